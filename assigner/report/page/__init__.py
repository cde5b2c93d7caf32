"""Plans as one HTML file that needs nothing else: no server, no network, no installation.

The file holds three things: text and tables, made here from the sheets that the command line prints too, so that they
are readable without scripts and on paper; the figures of the charts as JSON (`page_data`, which `--json` prints); and
the charts' code. What a chart shows by colour or hover is in a table below it as well; of the timeline, a table of
every action's start is in the file, and one of single messages and of measured actions is made by the code.

The charts are drawn by Apache ECharts, cut down by tools/charts to two series (565 kB with its licences): thousands of
actions redraw at once on its canvas, with zoom, pan and hover, and stacked areas and lines are of the same library.
"""
