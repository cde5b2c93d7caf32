"""What the searches may spend before they settle for less: every constant that trades time or memory for proof.

Sizes and counts are counted, not timed, wherever they can be, so that the answer is the same on every machine. What is
no choice (tolerances of rounding, words, units) stands where it is used.
"""

# All candidates

BASELINES_SHARE = 0.5
"""Of the time that is left: of many micro-batch counts baselines would have all of it, and the search none."""

MORE_EFFORT, MOST_EFFORT = 4, 4**6
"""A candidate that used up its counts goes on with so many times as many, up to so many times the first ones."""

CLOSE_NODES = 1_000
"""So many nodes one ILP may take to close the usual gap: counted, not timed, so that the answer is always the same."""

MOST_ORDERS = 6
"""Of a graph with up to so many topological orders, the intervals of each are looked at."""

OPTION_LEVELS = 40
"""So many options of one interval are told apart by what they rematerialise; the last stands for any deeper warm-up."""

COUNTED_SIZES = 3
"""Up to so many different activation sizes, counts per size are enumerated; more are left to branch and bound."""

KNAPSACK_NODES, KNAPSACKS_CUT, KNAPSACK_NEAR = 4_000, 100, 1e-4
"""So many nodes branch and bound may take to find what a worker must rematerialise: some 10 ms. Where they are not
enough, a good choice is looked for with as many more, until no other takes less by this share; and once so many
searches were cut off, all have a twentieth of the nodes."""

BYTE_PRICES = 24
"""So many prices of a byte are tried for a bound; with no more ratios of time to size it is the best of its kind."""

# The dynamic program

CHAMPIONS = 12
"""So many labels of a state, those of least price, are compared with all its others."""

GROWN = 400_000
"""So many labels are made at once: some 100 MB."""

FRONT_SUMS = 4_000_000
"""Positions, pairs of groups and choices of workers used, multiplied: with no more, least sums are made beforehand."""

# Stages that several workers share

MOST_SETS = 256
"""With up to so many choices of workers, like ones taken for one, every one may share a stage: 8 unlike workers."""

SHARED_DEPTHS = 24
"""Up to so many choices of warm-up depths, all are simulated; of more, those of a few policies, and near the best."""

REMAT_SETS, REMAT_PRICED = 2_048, 24
"""Of up to so many sets that the workers of a stage may rematerialise each is looked at, of more those left when names
are dropped one by one; and up to so many, better for one worker or another, are simulated for a proof."""

SHARED_STARTS = 12
"""So many sets of workers, those of least price, are tried with the whole model as their one stage."""

SHARED_ACTIONS = 200_000
"""So many simulated actions of workers are looked at first for a proof of all shares and depths: some three seconds."""

SHARINGS = 20_000
"""So many sharings of a chain's pipelines are priced at first, to have their best warm-up depths searched for."""

VISIT_WORK, SHARED_WORK = 3_000, 220_000_000
"""What a visit of a position and a set of workers takes, in labels; and so much all dynamic programs with shared stages
may take together, some five seconds, whatever time is left, unless the problem is small and a gap was asked for."""

SHARED_EFFORT = 4
"""What is open of shared stages gets so many times as much, whatever time is left, unless it is small and a gap was
asked for."""

# GPipe, one stage a worker

COARSE_GAP = 1e-3
"""With a smaller gap than this the relaxation by kinds of workers rarely proves anything: it does not go first."""

CLOSE_COLUMNS = 900
"""With up to so many intervals the ILP goes first: it closes any gap in seconds."""

MOST_COLUMNS = 40_000
"""With more intervals than this there is no ILP: the hierarchy finds the plan and bounds it."""

# 1F1B, throughput and latency

FIRST_WIDTH, PROOF_WIDTH, ALL_WIDTH = 300, 6_000, 50_000
"""Labels kept at a position: for good plans, for a bound, and to find every plan below the target."""

MOST_SIMULATED = 400
"""So many pipelines are simulated for a proof."""

MOST_TRIED = 24
"""So many are simulated where there is no proof to be had from it."""

MOST_DEPTHS = 200
"""Up to so many choices of warm-up depths, all are simulated; of more, those of a few policies."""

LABELS = 60_000_000
"""So many labels the dynamic program may make in one run: with many stage options it keeps fewer at a position."""

MOST_LABELS = 4 * LABELS
"""The same where it goes on because time is left: memory is the limit."""

FULL_OPTIONS = 8_000
"""With more stage options than this, the dynamic program leaves memory out."""

MOST_SEARCHED = 50_000
"""So many pipelines of a chain have their best warm-up depths searched for."""

BOXES_AT_ONCE, MOST_BOXES = 256, 300_000
"""So many boxes of warm-up depths are halved at once, and so many are bounded at first: some four seconds."""

BOX_CELLS = 32_000_000
"""Stages times micro-batches times boxes: fewer are halved at once where there would be more, which take 1 GB."""

CLOSE_OPTIONS, CLOSE_CUTS = 1_500, 60
"""With up to so many stage options the ILP closes the usual gap; so many pipelines it may name for that."""

CLOSE_SEARCHED = 10_000
"""The same of a chain, of whose pipelines the best depths are searched for."""

COARSE_OPTIONS = 100_000
"""With more stage options than this, there is no dynamic program: the perfect split of all work is the bound."""

SIMULATED_ACTIONS, PLAN_ACTIONS = 600_000, 16
"""Local search ends after so many simulated actions: counted, not timed, so that the answer is the same every time.
Where workers are taken by kind it has as many more for the depths of all pipelines that are looked at first. To make a
plan and begin its simulation takes as long as so many actions of each worker."""

SIFTED_AT_ONCE, SIFTED = 64, 16
"""Of large pipelines so many plans that are near the best have their longest ways taken at once, before one is
simulated; so many take about as long as one simulation."""

FITS_S = 10.0
"""Seconds for the question whether anything fits at all."""

# Fleets of any size

MOST_STATES = 40_000_000
"""Positions times states of a sweep: 320 MB. With more, kinds of workers are taken for one."""

VISIT_STATES = 20_000_000
"""Visits to hosts are looked at if there are no more positions times states than this."""

SETTLED = 400_000
"""With no more partitions than this, over all intervals whose remat is a bound, all are priced singly at the start."""

START_LIMIT = 3.0
"""Intervals up to so many times the slowest server of a perfect split are priced first."""

WIDER_LIMIT = 1.05
"""Ratio of the limits that are tried one after the other until there is a pipeline."""

NEAR_LIMIT = 1.001
"""The least limit within which there is a pipeline is known to within this ratio."""

BETTER_PATH = 2e-4
"""A pipeline of kinds is made into a plan if it promises to be better than the last by this share."""

TELL_S = 0.2
"""Seconds between two calls of `watch`."""

NARROW_CELL = 1e-5
"""Cells whose width matters less than this share of the bound are not cut any more: the bound stays theirs."""

FEW_VISITS, EXACT_VISITS, MOST_VISITS = 1_000, 10_000, 200_000
"""Positions times workers times groups of these: up to so many the dynamic program takes a second; some seconds, of
throughput, of which its price tells most; and with no more, first plans are looked for in several ways."""

DEEPER = (1.0, 1.5, 2.0, 2.5, 1.25, 1.75, 2.25, 3.0)
"""First plans keep so many micro-batches in flight for each stage behind one, and one more."""

WIDER_STARTS = 4
"""Where no pipeline is within a limit, and no plan known, it is widened so often for a first one, by START_LIMIT."""

DEPTH_BANDS = (1.1, 1.34)
"""Ratio of the most micro-batches in flight to the least that count as alike; and where that takes long."""

STEP_LOOKS = 4
"""So many sweeps raise the bound by kinds at first, beyond what one of all pipelines tells."""

NARROW_STEP = 1e-3
"""Pipelines of 1F1B whose waits differ by no more than this share of their step are not told apart: the bound stays
theirs."""

NEAR_TARGET = 0.99
"""A bound by kinds is not asked for again before the target has come down by more than this."""

ALIKE_NUMBERS = 100_000
"""Positions times numbers of workers of each kind that are told apart of what lies behind a stage."""

ASSIGNMENT_BEAM, ASSIGNMENTS_PER_GROUP = 200, 6
"""Partial lines that the beam keeps, and of those with the same last worker."""

# Stages of any shape

SMALL = 1 << 20
"""Exhaustive search is made if there are no more ways to put partitions on workers: 10 on 4, 12 on 3, 20 on 2."""

SMALL_CONVEX = 1 << 48
"""The same with one stage a worker, where most choices soon end: 24 on 4, 16 on 8."""

CERTAIN = 1 << 16
"""Up to here the search ends in a second or two: 8 on 4, 10 on 3, 16 on 2."""

CERTAIN_STEADY = 1 << 40
"""The same of the steady state, whose bound is sharper and is had sooner: 20 on 4, 25 on 3."""

NODES = 150_000
"""So many nodes of the exhaustive search are looked at at first: some 20 seconds. Counted: the same answer."""

VARIABLES = 6_000
"""With more binaries than this the load model is not built."""

STARTS = 2
"""The local search starts from so many of the best placements at hand."""

ANNEALING_ACTIONS = 3_000_000
"""So many timed actions of stages are looked at: about two seconds. Counted, not timed: the same answer every time."""

ANNEALING_TRIES = 12_000
"""So many neighbours at most."""

MOST_CHOSEN = 24
"""Of like workers that all-reduces with others tell apart, so many choices are priced for a plan; of more the dynamic
program's price is the bound."""

KNOWN_VISITS = 300
"""Where plans of simpler ways are known, the dynamic program looks for a branched graph's first ones only up to so many
positions times workers times groups of these: of 18 partitions on 6 unlike workers it took a third of 40 seconds, and
local search from simpler plans found better ones in a few."""

REARRANGED, REARRANGED_WITHIN = 6, 0.3
"""So many local searches over the stages of a branched graph under 1F1B follow each other, while each finds the best
plan of all. The first begins from a plan that takes longer than the best by no more than this share; where up to
CERTAIN convex stages are all looked at instead, other warm-ups are tried with those that take longer by no more."""

REARRANGED_TRIED = 8
"""With so many of these, the best at usual warm-ups."""

HOT, COLD = 0.05, 0.0005
"""A placement worse by this share is still taken now and then, at first and in the end."""

LISTED = 12
"""Up to so many partitions on a worker with several stages, all choices are listed; else only the cheapest one is."""

# Money

MOST_CHOICES = 4_096
"""So many choices of workers are looked at, those with the fewest workers; all others together have one bound."""

# Which of plans as good

LIGHTER = 0.9
"""A slower plan is worth it if it needs no more than this share of the memory."""

# What-ifs

CHEAP = 400
"""Up to this many partitions x (workers + 1) x searches, what-ifs are priced without being asked for."""

SKIPS = 2.5
"""A graph with skips, whose plans the simulator prices one by one, takes so many times as long as a chain."""

WHAT_IF_EFFORT = 0.25
"""Of what a search over orders or shares may spend, where it only prices a what-if."""

MORE_SEARCH = 0.02
"""Searching once more may gain so much by itself, where orders are solved: no gain of a what-if."""

LOOSER = 3.0
"""How many times the gap asked for is left open with one more worker: the larger problem, and one for each kind."""

# Robustness

RESOLVE_S = 10.0
"""Seconds for one draw that is solved again."""

# Why nothing fits

QUESTION_S = 5.0
"""Seconds that one question may take at most."""

WAYS_OUT = 6
"""Ways out that are told."""

LEAST_S, MOST_S = 5.0, 30.0
"""Seconds for the questions: so many even where the search has used up its own, and no more where it has not."""

HINTS_AT_ONCE = 2
"""Rows for hints, of the many that may do."""

HINTS_TRIED = 24
"""Hints that are tried one by one; where there are more, all are dropped and then taken back as far as that goes."""

HINTS_NAMED = 6
"""Hints that are listed in one sentence."""

COMBINED = 3
"""Pairs that are told."""

MEMORIES_TRIED = 8
"""Workers whose memory is raised by itself; where there are more, the largest of each kind come first."""

LINKS_TRIED = 16
"""Pairs of workers that are tried one by one."""

# The weighted baseline

BANDWIDTH, COMPUTE, MEMORY, ENTROPY = 5.0, 1.0, 1.0, 0.3
"""Weights of the costs: what did best on the synthetic clusters of benchmarks/solver/clusters.py and small chains."""

ITERATIONS, FEWEST, RATE, LARGE = 300, 60, 0.1, 10_000
"""Steps and step size of Adam (Kingma and Ba, ICLR 2015); of more than `LARGE` probabilities fewer, larger steps."""

# Orders of actions

ORDER_STARTS = 3
"""Exchanges begin from so many of the best orders of list scheduling."""

ORDER_TASKS = 150_000
"""So many tasks are timed while one placement's order is made better: a tenth of a second or two."""

EVERY_TASK, EVERY_NODES = 24, 20_000
"""With up to so many tasks every order is looked at, as far as so many nodes of the search reach."""

LISTED_TASKS = 300_000
"""So many tasks are put in order while placements are looked for, all counts together: about a second."""

LISTED_TRIES = 1_500
"""So many placements at most."""

LISTED_COUNTS = 2
"""Placements are looked for with so many micro-batch counts, those that promise most; with others they are priced."""

EXCHANGED = 500
"""So many plans are simulated while like workers are exchanged, for the sake of wires that links share."""

LOOPED_NODES = 6_000
"""So many nodes of exhaustive search look for several stages a worker where the schedule is open: a second or less."""

LOOPED_ALONE = 10
"""So many times that where no other plan was found."""

LISTED_POLISHED = 3
"""So many placements, the best, have their order made better by exchanges."""

LISTED_VALUES = 20_000
"""With more partitions x workers x workers than this no placements are looked for: those at hand are put in order."""

MOST_TASKS = 40_000
"""A plan with more forwards and backwards than this keeps its named schedule."""

ORDERS_SHARE = (0.1, 0.25)
"""Of the time this share is kept for placements and orders, which are looked for last: of a chain, and of a branched
graph."""

LISTED_GAIN = 0.07
"""Listed orders and several stages a worker are taken if the step is predicted to be shorter by this share. Others are
simpler, and workers that wait for each other at every stage pay for each one's variation, of which profiles have
medians. On three unlike hosts such plans were to win 7, 9 and 12 % and won 10, 1 and 13 %; what promised less won less
when it ran, or lost (docs/solving.md)."""

ROUNDING = 1e-9
"""Values that differ by this share, or less, may be one: sums of the same figures, taken in another order."""

TIE = 1e-12
"""Plans that differ by less, as a share, are as good: rounding must not choose between them."""
