"""Which way a microbatch takes: legal orders of stages, how often each is visited, lanes agreed between data nodes,
timetables of peers. Pure."""
