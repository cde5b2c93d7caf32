"""Predictions and what came of them: a plan beside a trace of its run, and a profile corrected by it.

observed                      a trace in the cost model's terms; the trace that the prediction would write
comparison                    predicted beside measured; where the difference comes from
calibration                   the corrected profile
machine                       whether the machine has changed since it was profiled
checkedplan                   whether a plan's own figures still hold
spans                         what each worker did, predicted or traced, in one form
steps                         steps of runs as statistics: the median with its spread, how sure a speed-up is
"""
