"""Custody, transition by transition.

A trace: its title, this peer, what has happened before; then lines of events, and what custody does about the last one;
at the end the phase of each entry. `handed 0`: received, computed and offered. The words are in `custody_desk`.
"""

import pytest

from swarm.vocabulary.types import MAX_HOPS, PeerId
from tests.swarm.pipeline.custody_desk import Desk

TRACES = """
== the way everything goes well
# a hop says how long it let the microbatch wait, computed and sent, and is done when its gradient is passed on
b
forward 1                   | a < accepted out 1; compute FORWARD 1
wait 5, computed 1 3        | c < hidden 2 by a b c
wait 0.5, c busy out 2 1    | c2 < hidden 2 by a b c2
wait 0.25, c2 busy out 2 0.25
wait 0.25                   | c2 < hidden 2 by a b c2
wait 0.125
c2 accepted out 2           | a < passed_on out 1 waited 3 computed 3 sent 0.125;
                            | data < passed_on out 1 waited 3 computed 3 sent 0.125
c2 passed_on out 2
backward 1 by a b c2        | c2 < accepted back 1; compute BACKWARD 1
wait 0.5, computed 1 0.5    | a < gradient 0 by a b c2
a accepted back 0           | c2 < passed_on back 1 computed 0.5; data < passed_on back 1 computed 0.5
a passed_on back 0
data settled by a b c2      | count 1; forget 1, complete
= gone
# a data node starts, turns round and finishes
data
start                       | compute FORWARD -1
computed -1                 | a < hidden 0 by a b c
a accepted out 0            | data < passed_on out -1
a passed_on out 0
forward 3                   | c < accepted out 3; compute LOSS 3
computed 3                  | c < gradient 2 by a b c
c accepted back 2           | data < passed_on back 3
c passed_on back 2
backward -1                 | a < accepted back -1; compute BACKWARD -1
computed -1                 | finished by a b c; forget -1, completed; forget 3, completed; a < settled by a b c;
                            | b < settled by a b c; c < settled by a b c
= gone
# a path without hops goes from the data node to itself
data
start by                    | compute FORWARD -1
computed -1                 | data < hidden 0 by
forward 0 by                | data < accepted out 0; compute LOSS 0
data accepted out 0         | data < passed_on out -1
computed 0                  | data < gradient -1 by
backward -1 by              | data < accepted back -1; compute BACKWARD -1
data accepted back -1       | data < passed_on back 0
computed -1                 | finished by; forget -1, completed; forget 0, completed
= gone
# a gradient that overtakes the receipts is taken
a
handed 0                    | b < hidden 1 by a b c
admit backward 0            | FREE
backward 0                  | b < accepted back 0; compute BACKWARD 0
b accepted out 1, lose b
= 0 BACKWARD
# an evaluated microbatch is gone when the next peer has accepted it
a
handed 0 evaluate           | b < hidden 1 by a b c
admit backward 0            | REFUSED
b accepted out 1            | data < passed_on out 0; forget 0, passed on
= gone
# an evaluated microbatch ends with its loss
data
start evaluate              | compute FORWARD -1 evaluate
computed -1                 | a < hidden 0 by a b c
a accepted out 0            | data < passed_on out -1; forget -1, passed on
forward 3 evaluate          | c < accepted out 3; compute LOSS 3 evaluate
computed 3                  | forget 3, evaluated
= gone

== tensors that nobody waits for, or that come again
# a tensor without a reservation is refused
a
backward 0                  | b < refused back 0
= gone
# a reservation that breaks off leaves nothing
a
admit forward 0             | FREE
broken forward 0            | forget 0, broken off
= gone
# broken off means nothing once the tensor is there
a
forward 0                   | data < accepted out 0; compute FORWARD 0
broken forward 0
= 0 FORWARD
# a gradient before the output is there comes again later
a
forward 0                   | data < accepted out 0; compute FORWARD 0
admit backward 0            | BUSY
backward 0                  | b < busy back 0 retry 0.3
= 0 FORWARD
# a second copy of a gradient is answered and not computed
a: handed 0
b passed_on out 1           | data < passed_on out 0
backward 0                  | b < accepted back 0; compute BACKWARD 0
backward 0                  | b < accepted back 0
computed 0                  | data < gradient -1 by a b c
backward 0                  | b < accepted back 0
data accepted back -1       | b < passed_on back 0; data < passed_on back 0
backward 0                  | b < accepted back 0; b < passed_on back 0
= 0 SETTLING
# a gradient comes only from a replica of the next module, by the same stages
b: handed 1
lose c                      | c2 < hidden 2 by a b c2
admit backward 1 by a b c2  | FREE
admit backward 1            | FREE
admit backward 1 by a b a2  | REFUSED
admit backward 1 by a b a@3 | REFUSED
admit backward 1 by a b     | REFUSED
= 1 HANDING_ON
# each side of a hop knows the repairs of its own side
b
forward 1 by a2 b c         | a2 < accepted out 1; compute FORWARD 1
computed 1                  | c < hidden 2 by a2 b c
backward 1 by a b c2        | c2 < accepted back 1; compute BACKWARD 1
computed 1                  | a2 < gradient 0 by a2 b c2
= 1 HANDING_BACK
# the same input again is answered and not computed
a
forward 0                   | data < accepted out 0; compute FORWARD 0
forward 0                   | data < accepted out 0
computed 0                  | b < hidden 1 by a b c
forward 0                   | data < accepted out 0
b accepted out 1            | data < passed_on out 0
forward 0                   | data < accepted out 0; data < passed_on out 0
= 0 GUARDING
# the same input again, when the next hop was replaced meanwhile
a: handed 0
lose b                      | b2 < hidden 1 by a b2 c
forward 0                   | data < accepted out 0
b2 accepted out 1           | data < passed_on out 0
forward 0                   | data < accepted out 0; data < passed_on out 0
= 0 GUARDING
# a copy by a repaired path replaces one that awaits its gradient
b: handed 1, c passed_on out 2
forward 1 by a2 b c         | forget 1, replaced by a repaired path; a2 < accepted out 1; compute FORWARD 1
= 1 FORWARD
# once the gradient is there, a copy by another path changes the way back only
b: handed 1, backward 1
forward 1 by a2 b c         | a2 < accepted out 1; a2 < passed_on out 1
computed 1                  | a2 < gradient 0 by a2 b c
forward 1                   | a < accepted out 1; a < passed_on out 1; a < gradient 0 by a b c
a passed_on back 0          | c < passed_on back 1; data < passed_on back 1
forward 1 by a2 b c         | a2 < refused out 1
= 1 SETTLING
# it turns round once, whoever brings it
data: start, computed -1, a passed_on out 0, forward 3, computed 3
forward 3 by a b c2         | c2 < accepted out 3; c2 < passed_on out 3; c2 < gradient 2 by a b c2
c2 passed_on back 2         | data < passed_on back 3
forward 3                   | c < refused out 3
backward -1                 | a < accepted back -1; compute BACKWARD -1
computed -1                 | finished by a b c; forget -1, completed; forget 3, completed; a < settled by a b c;
                            | b < settled by a b c; c < settled by a b c
= gone
# it turns round once, though a copy comes by a longer path
data fewest 2: start, computed -1
forward 2 by a c            | c < accepted out 2; compute LOSS 2
computed 2                  | c < gradient 1 by a c
forward 3                   | forget 3, another copy arrived first; c < accepted out 3; c < passed_on out 3
c accepted back 1           | data < passed_on back 2
= -1 HANDING_ON, 2 GUARDING_BACK
# the end has no deadline once its gradient was passed on
data: start, computed -1, a passed_on out 0, forward 3, computed 3, c passed_on back 2
lose c, wait 29, touch -1, wait 29
wait 1                      | forget -1, no progress for 30 s; data < stranded out -1, it was lost
= 3 GUARDING_BACK

== the way out goes wrong
# a lost successor that guards it is replaced from the kept output
a: handed 0, b accepted out 1
lose b                      | b2 < hidden 1 by a b2 c
= 0 HANDING_ON
# the loss of a successor that has passed it on does not matter
a: handed 0, b passed_on out 1
lose b
= 0 AWAITING
# a refusing successor is replaced and not asked again
a: handed 0
b refused out 1             | b2 < hidden 1 by a b2 c
b2 refused out 1            | b3 < hidden 1 by a b3 c
b3 refused out 1            | forget 0, refused: ; module 2.0 has no other replica;
                            | data < stranded out 1, refused: ; module 2.0 has no other replica
= gone
# a busy successor is replaced; when all are busy, the last is asked again, then the others
a: handed 0, dead b3
b busy out 1 1              | b2 < hidden 1 by a b2 c
b2 busy out 1 1, wait 0.9
wait 0.2                    | b2 < hidden 1 by a b2 c
wait 0.6, b2 busy out 1 1   | b < hidden 1 by a b c
= 0 HANDING_ON
# a replica that refused is not asked again because the rest are busy
a: handed 0, dead b3
b refused out 1             | b2 < hidden 1 by a b2 c
b2 busy out 1 1, wait 1.1   | b2 < hidden 1 by a b2 c
b2 busy out 1 1, wait 3.1   | b2 < hidden 1 by a b2 c
= 0 HANDING_ON
# BUSY after ACCEPTED is not believed
a: handed 0, b accepted out 1
b busy out 1 1
= 0 GUARDING
# a lone successor that comes back gets it, and a later outage has the whole patience
a: handed 0, dead b2 b3
lose b, wait 0.31           | b < hidden 1 by a b c
b accepted out 1            | data < passed_on out 0 waited 0.31
wait 10, lose b
= 0 HANDING_ON
# a replica that comes up meanwhile gets it, with the whole patience
a: handed 0, dead b2 b3
lose b, wait 4.7            | b < hidden 1 by a b c
dead b2, lose b             | b3 < hidden 1 by a b3 c
wait 0.6, lose b3, lost b3  | forget 0, the link broke; module 2.0 has no other replica;
                            | data < stranded out 1, the link broke; module 2.0 has no other replica
= gone
# the data node is never replaced
c: handed 2
data busy out 3 1, wait 1.1 | data < hidden 3 by a b c
lost data                   | forget 2, the link broke; data < stranded out 3, the link broke
= gone
# only the target can answer, in its direction and for its position
a: handed 0
b2 accepted out 1, b2 refused out 1, b accepted back 1, b accepted out 2, b accepted back -1, b busy out 0 1
= 0 HANDING_ON
# a computation that fails strands it
a
forward 0                   | data < accepted out 0; compute FORWARD 0
failed 0                    | forget 0, out of memory; data < stranded out 0, out of memory
= gone

== a hop that nobody replaces is skipped where the run allows it
# the hop after gets what the lost one cannot take
a fewest 2: dead b2 b3 c2, handed 0
lost b                      | c < hidden 1 by a c
c passed_on out 1           | data < passed_on out 0 waited 5.27
admit backward 0            | REFUSED
backward 0 by a c           | c < accepted back 0; compute BACKWARD 0
= 0 BACKWARD
# a module that new paths avoid is skipped without waiting
a fewest 2: dead b2 b3 c2, handed 0
lose b, gone 2, wait 0.31   | c < hidden 1 by a c
= 0 HANDING_ON
# a gradient for a module that new paths avoid does not wait
c fewest 2: dead b2 b3, handed 2, backward 2, computed 2
lose b, gone 2, wait 0.31   | data < stranded back 1, no peer serves its module; data < asks; data < passed_on back 2
= 2 SETTLING
# without leave to skip it waits, though new paths avoid the module
a: dead b2 b3, handed 0
gone 2, lost b              | forget 0, the link broke; module 2.0 has no other replica;
                            | data < stranded out 1, the link broke; module 2.0 has no other replica
= gone
# after the last hop comes the data node
b fewest 2: dead c2, handed 1
lost c                      | data < hidden 2 by a b
= 1 HANDING_ON
# the hop after a skipped one is replaced like any other, and not skipped as well
a fewest 2: dead b2 b3, handed 0
lost b                      | c < hidden 1 by a c
c refused out 1             | c2 < hidden 1 by a c2
c2 refused out 1            | forget 0, refused: ; module 3.0 has no other replica;
                            | data < stranded out 1, refused: ; module 3.0 has no other replica
= gone
# a busy hop is not skipped
a fewest 2: dead b2 b3, handed 0
b busy out 1 1, wait 1.1    | b < hidden 1 by a b c
= 0 HANDING_ON
# an evaluated microbatch skips nothing
a fewest 2: dead b2 b3, handed 0 evaluate
lost b                      | forget 0, the link broke; module 2.0 has no other replica;
                            | data < stranded out 1, the link broke; module 2.0 has no other replica
= gone
# hops before the skipped one learn of it by the gradient
data fewest 2: start, computed -1, a accepted out 0
forward 2 by a c            | c < accepted out 2; compute LOSS 2
computed 2                  | c < gradient 1 by a c
c accepted back 1           | data < passed_on back 2
backward -1 by a c          | a < accepted back -1; compute BACKWARD -1
computed -1                 | finished by a c; forget -1, completed; forget 2, completed; a < settled by a c;
                            | c < settled by a c
= gone
# a stage with another expert is never skipped: the data node launches the text again
a fewest 2: dead b2 b3, handed 0
elsewhere 2, gone 2, lose b | forget 0, the link broke; module 2.0 has no other replica;
                            | data < stranded out 1, the link broke; module 2.0 has no other replica
= gone

== the way back goes wrong
# a lost predecessor is tried again, then replaced from the kept gradient
b: handed 1, backward 1, computed 1
lose a, wait 0.5            | a < gradient 0 by a b c
wait 0.5, lose a            | a2 < gradient 0 by a2 b c
a2 accepted back 0          | c < passed_on back 1 waited 1; data < passed_on back 1 waited 1
= 1 GUARDING_BACK
# a lost guard of the gradient is tried again, then replaced
b: handed 1, backward 1, computed 1, a accepted back 0
lose a, wait 0.9            | a < gradient 0 by a b c
lose a, wait 0.2, lose a    | a2 < gradient 0 by a2 b c
= 1 HANDING_BACK
# a predecessor that is given up is replaced as soon as that is known
b: handed 1, backward 1, computed 1
lose a, given_up a
wait 0.31                   | a2 < gradient 0 by a2 b c
= 1 HANDING_BACK
# a gradient that the data node refuses may have arrived: both hops ask, this one at once
a: handed 0, backward 0, computed 0
data refused back -1        | data < stranded back -1, refused: ; data < asks; b < passed_on back 0
wait 3                      | data < asks
data settled                | count 0; forget 0, complete
= gone
# a guard that is released by such a hop asks, too
b: handed 1, backward 1, computed 1, a accepted back 0, a passed_on back 0
wait 3                      | data < asks
data settled                | count 1; forget 1, complete
= gone
# the data node has no substitute on the way back
a: handed 0, backward 0, computed 0
lost data                   | data < stranded back -1, the link broke; data < asks; b < passed_on back 0
= 0 SETTLING
# a refused gradient goes to a substitute at once, and strands without one
b: handed 1, backward 1, computed 1
a refused back 0            | a2 < gradient 0 by a2 b c
a2 accepted back 0          | c < passed_on back 1; data < passed_on back 1
a2 refused back 0           | data < stranded back 0, refused: ; data < asks; c < passed_on back 1
= 1 SETTLING
# a busy predecessor has the input: it is waited for
b: handed 1, backward 1, computed 1
a busy back 0 1, wait 1.1   | a < gradient 0 by a b c
= 1 HANDING_BACK
# of busy substitutes any will do
c: handed 2, backward 2, computed 2
b refused back 1            | b2 < gradient 1 by a b2 c
b2 busy back 1 1            | b3 < gradient 1 by a b3 c
b3 busy back 1 1, wait 1.1  | b3 < gradient 1 by a b3 c
= 2 HANDING_BACK
# a gradient at the end of a path that nobody takes strands
data: start, computed -1, a passed_on out 0, forward 3, computed 3, dead c2
lost c                      | forget 3, the link broke; data < stranded back 2, the link broke
= -1 AWAITING
# a backward that fails strands it
a: handed 0, b passed_on out 1, backward 0
failed 0                    | forget 0, out of memory; data < stranded back 0, out of memory
= gone

== a substitute on the way back
# it gets the gradient, recalls the input and computes both passes in one
b2: admit backward 1 by a b2 c
backward 1 by a b2 c        | keep 1; c < accepted back 1; a < recall 0 by a b2 c
forward 1 by a b2 c         | a < accepted out 1; a < passed_on out 1; compute REPLAY 1
computed 1                  | a < gradient 0 by a b2 c
a accepted back 0           | c < passed_on back 1; data < passed_on back 1
= 1 GUARDING_BACK
# it knows the way back from the input, the way after from the gradient
b2: admit backward 1 by a b2 c2
backward 1 by a b2 c2       | keep 1; c2 < accepted back 1; a < recall 0 by a b2 c2
forward 1 by a2 b2 c        | a2 < accepted out 1; a2 < passed_on out 1; compute REPLAY 1
computed 1                  | a2 < gradient 0 by a2 b2 c2
= 1 HANDING_BACK
# a data node has no substitute
data
admit backward -1           | REFUSED
admit backward 3            | REFUSED
= gone
# a gradient that breaks off leaves nothing
b2: admit backward 1 by a b2 c
broken backward 1 by a b2 c | forget 1, broken off
= gone
# the input is asked for again, unless it is in flight
b2: admit backward 1 by a b2 c, backward 1 by a b2 c
wait 1                      | a < recall 0 by a b2 c
admit forward 1 by a b2 c   | FREE
wait 1, broken forward 1 by a b2 c
wait 0                      | a < recall 0 by a b2 c
lose a
= 1 RECALLING
# a gradient that is not needed any more is let go
b2: admit backward 1 by a b2 c, backward 1 by a b2 c
a passed_on back 0          | c < passed_on back 1; forget 1, the gradient arrived there already
= gone
# a gradient whose input is refused is given back
b2: admit backward 1 by a b2 c, backward 1 by a b2 c
a busy back 0 1
a refused back 0            | c < refused back 1; forget 1, no input:
= gone
# a gradient whose input does not come is given back
b2: admit backward 1 by a b2 c, backward 1 by a b2 c
wait 7.9                    | a < recall 0 by a b2 c
wait 1                      | c < refused back 1; forget 1, the input is not available
= gone
# a second gradient waits until it is known what becomes of the first
b2: admit backward 1 by a b2 c, backward 1 by a b2 c
admit backward 1 by a b2 c  | FREE
backward 1 by a b2 c        | c < accepted back 1
admit backward 1 by a b2 c2 | BUSY
admit backward 1 by a b2 b3 | REFUSED
= 1 RECALLING
# a later skip does not hinder it
b2 fewest 2: admit backward 1 by a b2, backward 1 by a b2
forward 1 by a b2 c         | a < accepted out 1; a < passed_on out 1; compute REPLAY 1
computed 1                  | a < gradient 0 by a b2
= 1 HANDING_BACK

== the hop before a substitute
# a recalled output goes to the substitute, again if that has lost it
a: handed 0
b2 recalls 0 by a b2 c      | b2 < hidden 1 by a b2 c
b2 recalls 0 by a b2 c
b2 passed_on out 1          | data < passed_on out 0
b2 recalls 0 by a b2 c      | b2 < hidden 1 by a b2 c
= 0 HANDING_ON
# the hop that was replaced is not asked again for an awaited one
a: handed 0, b passed_on out 1
b2 recalls 0 by a b2        | b2 < hidden 1 by a b2 c
b2 refused out 1            | b3 < hidden 1 by a b3 c
= 0 HANDING_ON
# one that has the gradient needs no second
a: handed 0, b passed_on out 1, backward 0
b2 recalls 0 by a b2 c      | b2 < passed_on back 0
computed 0                  | data < gradient -1 by a b c
b2 recalls 0 by a b2 c      | b2 < passed_on back 0
data accepted back -1       | b < passed_on back 0; data < passed_on back 0
b2 recalls 0 by a b2 c      | b2 < passed_on back 0
= 0 SETTLING
# the first gradient is taken, every later one let go
a: handed 0, b passed_on out 1
b2 recalls 0 by a b2 c      | b2 < hidden 1 by a b2 c
backward 0                  | b < accepted back 0; compute BACKWARD 0
computed 0                  | data < gradient -1 by a b c
backward 0 by a b2 c        | b2 < passed_on back 0
= 0 HANDING_BACK
# no other peer may recall
a: handed 0, b passed_on out 1
b2 recalls 0                | b2 < refused back 0
c recalls 0 by a c          | c < refused back 0
c recalls 0 by a c@2 c      | c < refused back 0
a2 recalls 0 by a a2 c      | a2 < refused back 0
= 0 AWAITING
# what is not held, not computed or only evaluated cannot be recalled
a
b2 recalls 0 by a b2 c      | b2 < refused back 0
forward 0 evaluate          | data < accepted out 0; compute FORWARD 0 evaluate
b2 recalls 0 by a b2 c      | b2 < refused back 0
= 0 FORWARD
# what is not computed yet can be recalled later
a
forward 0                   | data < accepted out 0; compute FORWARD 0
b2 recalls 0 by a b2 c      | b2 < busy back 0 retry 0.3
= 0 FORWARD

== whose gradient counts
# a gradient on the final path counts, and only its data node may say so
a: handed 0, backward 0, computed 0, data accepted back -1
b settled by a2 b c
data settled                | count 0; forget 0, complete
= gone
# a gradient on another path is taken back
a: handed 0, backward 0, computed 0
data settled by a2 b c      | take back 0; forget 0, complete
= gone
# one that is being computed is asked about later
a: handed 0, backward 0
data settled, computed 0    | data < gradient -1 by a b c
data accepted back -1       | b < passed_on back 0; data < passed_on back 0
wait 3                      | data < asks
= 0 SETTLING
# a data node that is linked again is asked at once, uncounted, others are not
a: handed 0, backward 0, computed 0, data accepted back -1
lose data, linked data      | data < asks
linked b, wait 3            | data < asks
= 0 SETTLING
# a data node answers hops that ask, unless the microbatch is in flight
data
a asks                      | a < close
start                       | compute FORWARD -1
a asks, computed -1         | a < hidden 0 by a b c
a passed_on out 0           | data < passed_on out -1
forward 3                   | c < accepted out 3; compute LOSS 3
computed 3                  | c < gradient 2 by a b c
backward -1                 | a < accepted back -1; compute BACKWARD -1
computed -1                 | finished by a b c; forget -1, completed; forget 3, completed; a < settled by a b c;
                            | b < settled by a b c; c < settled by a b c
a asks                      | a < settled by a b c
a2 recalls -1 by a2 b c     | a2 < passed_on back -1
= gone
# nobody else answers
a
b asks
= gone
# a close takes back what is not settled
a: handed 0, backward 0, computed 0, data accepted back -1
data close                  | take back 0; forget 0, closed: abandoned
= gone
# a close of what has no gradient takes nothing back
a: handed 0, b passed_on out 1
data close                  | forget 0, closed: abandoned
= gone
# abandoning forgets both ends and tells every hop, those of a repaired path, too
data: start, computed -1
forward 3 by a b2 c         | c < accepted out 3; compute LOSS 3
abandon                     | forget -1, enough; forget 3, enough; a < close; b < close; c < close; b2 < close
abandon
= gone

== deadlines
# whatever happens renews the deadline
a: handed 0
wait 29, b accepted out 1   | data < passed_on out 0 sent 29
wait 29, b passed_on out 1, wait 29
= 0 AWAITING
# a gradient that was added is not forgotten: the hop asks
b: handed 1, backward 1, computed 1, a accepted back 0
wait 30, wait 3             | data < asks
= 1 SETTLING
# a computation is never overdue
a: handed 0, backward 0
wait 1000, computed 0       | data < gradient -1 by a b c
= 0 HANDING_BACK
# a vanished data node's microbatches have a grace period
a: handed 0, b accepted out 1
lose data, wait 19, wait 1  | forget 0, no progress for 30 s
= gone
# a step in the grace period begins another
a: handed 0
lose data, wait 10
b accepted out 1            | data < passed_on out 0 sent 10
wait 19, wait 1             | forget 0, no progress for 30 s
= gone
# the grace period never lengthens a deadline
a: handed 0, b passed_on out 1
wait 29, lose data, wait 1  | forget 0, no progress for 30 s
= gone
# a message of the data node ends it, too
a: handed 0, b passed_on out 1
lose data, wait 10, data accepted out 1, wait 29
wait 1                      | forget 0, no progress for 30 s
= gone
# a data node without a link is told, so that there is one, and has a grace period until then
b: unlinked data
forward 1                   | a < accepted out 1; data < accepted out 1; compute FORWARD 1
wait 19, wait 1             | forget 1, no progress for 30 s
= gone
# with that link its microbatches are kept
b: unlinked data
forward 1                   | a < accepted out 1; data < accepted out 1; compute FORWARD 1
unlinked, linked data, wait 29
wait 1                      | forget 1, no progress for 30 s
= gone
"""


def traces() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in TRACES.splitlines():
        if line.startswith("# "):
            lines = found.setdefault(line[2:], [])
            assert not lines, f"twice: {line}"
        elif line.startswith(" "):  # more of what the event before brings about
            lines[-1] += f" {line.partition('|')[2].strip()}"
        elif line and not line.startswith("=="):
            lines.append(line)
    return found


@pytest.mark.parametrize("title", traces())
def test_a_transition(title: str) -> None:
    head, *lines = traces()[title]
    peer, _, before = head.partition(":")
    own, *fewest = peer.split(" fewest ")
    desk = Desk(PeerId(own), fewest_hops=int(fewest[0]) if fewest else MAX_HOPS)
    for event in filter(None, before.split(",")):
        desk.do(event.strip())
    for line in lines[:-1]:
        events, _, expected = line.partition("|")
        *quiet, last = (event.strip() for event in events.split(","))
        for event in quiet:
            assert (event, desk.do(event)) == (event, "")
        assert (last, desk.do(last).rstrip()) == (last, expected.strip())
    assert f"= {desk.state()}" == lines[-1]


def test_a_link_is_measured_by_what_arrives_and_by_what_is_given_up() -> None:
    desk = Desk(PeerId("a"))
    desk.do("handed 0")
    for event in ("wait 2", "b busy out 1 1", "wait 3", "b2 accepted out 1"):
        desk.do(event)
    assert desk.sendings == ["b2 3"], "a busy peer has got nothing"
    desk.do("data close")
    assert desk.sendings == ["b2 3"], "it had arrived"
    other = Desk(PeerId("a"))
    for event in ("handed 0", "wait 20", "data close"):
        other.do(event)
    assert other.sendings == ["b 20"]
    refused = Desk(PeerId("a"))
    for event in ("handed 0", "wait 1", "b refused out 1", "wait 2", "b2 accepted out 1"):
        refused.do(event)
    assert refused.sendings == ["b2 2"], "a refusal is no delivery"
