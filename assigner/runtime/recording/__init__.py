"""What a rank has done and held, noted while it does it.

recorder    a span for every action, of which the last steps are kept
clock       two workers' clocks compared
ranges      each action under a name of its own in `torch.profiler`
memory      what this process holds, after every action
reference   how fast the machine is, beside what was recorded
"""
