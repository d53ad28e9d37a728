"""Plans to hold the planner against: the earliest return, one by one, and a long search. No node works like this."""
