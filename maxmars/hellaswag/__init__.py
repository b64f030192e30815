"""HellaSwag under the two protocols in use, which score the same GPT-2 differently.

`lm_eval` is lm-evaluation-harness's, which the MARS paper reports: the activity's label stands
before the context, texts are cleaned, and `acc_norm` divides each ending's log-likelihood by its
number of characters. `completion` is that of nanoGPT and llm.c: the raw context and endings,
encoded apart, and `acc_norm` goes by the mean loss of an ending's tokens. GPT-2 small has an
`acc_norm` of 31.14 % by the first and 29.55 % by the second.
"""

from maxmars.hellaswag.comparison import PairedDifference, compare
from maxmars.hellaswag.in_loop import HellaSwagInLoop
from maxmars.hellaswag.protocols import PROTOCOLS, Protocol
from maxmars.hellaswag.questions import Question, load_questions
from maxmars.hellaswag.scores import HellaSwag, Scores, write_questions

__all__ = [
    "PROTOCOLS",
    "HellaSwag",
    "HellaSwagInLoop",
    "PairedDifference",
    "Protocol",
    "Question",
    "Scores",
    "compare",
    "load_questions",
    "write_questions",
]
