"""When the tokens of a call are placed in the regions of its layer, for growing and static stores alike.

A call's tokens are exact during that call. Few of them (at most DRAFT_MARGIN, with the padding settled) are placed at once, so
that a single kernel can read everything; many (a prompt) wait until their forward has read them. The states:

    state      what the regions hold        the latest call's tokens                    leaves by
    EMPTY      nothing                      none                                        add -> WAITING
    WAITING    the calls before it          beside the regions, as the model made them  place_waiting -> PLACED
    PLACED     everything                   in the regions                              add -> PLACED or WAITING;
                                                                                       open_forward -> STEPS
    STEPS      everything (static stores)   in the regions; lengths live on the device  begin, know_lengths
                                                                                       (crop, check_overflow) -> PLACED

One rule says when a prompt is placed, for growing and for static stores: at the next update of any layer, except that a layer
whose keys other layers read later in the same forward (Gemma 3n, Gemma 4) waits for the next forward; and before crop, select and
save (reset drops it, copies carry it). So no layer but such a one holds its prompt in full while others run, and what a forward
reads of its own tokens is exact. A static cache
takes a question for its length or for the size of the next mask as the beginning of a forward, too: the step that follows may
be compiled, and no graph can place a prompt.
"""

import weakref
from dataclasses import dataclass

from torch import Tensor

# Tokens of the latest call that stay exact beyond the recent window, and the most that are placed at once.
DRAFT_MARGIN = 32


@dataclass
class WaitingPrompt:
    """Keys and values [B, H, M, D] of a call that are not placed yet. call: a weak reference to what reads them; weak, because
    that refers to the store, and a cycle would keep a whole prompt alive until the next collection."""

    keys: Tensor
    values: Tensor
    call: weakref.ref | None = None

    def __getstate__(self):
        # A copy is placed by its own next update; nothing learns from its masks, and no gradient comes along.
        return {"keys": self.keys.detach(), "values": self.values.detach(), "call": None}
