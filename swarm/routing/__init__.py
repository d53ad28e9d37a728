"""Which way a microbatch takes: legal orders of stages, equal visits, lanes agreed between data nodes, timetables of
peers. Pure."""
