"""Questions in HellaSwag's own format, written for these tests, and the texts that they become."""

import json

SHORT = [
    ("Baking", "A man cuts dough.", "he", ["eats it.", "sings.", "bakes it.", "flies."], 2),
    ("Rowing", "A boat is on a lake.", "two girls", ["row.", "row it.", "sink.", "cook."], 0),
    ("Chess", "They sit down.", "", ["She moves.", "It rains.", "A dog.", "She moves."], 0),
    ("Knots", "A rope lies there.", "a boy", ["ties it.", "is.", "barks.", "ties a KNOT."], 3),
    ("Skiing", "Snow falls.", "then the SKIER", [", he", "goes.", "melts.", "is a lake."], 1),
]
"""Activity, whole sentences, begun sentence, endings, label."""

WIKIHOW = (
    "[header] How to hang a lamp [title] Choose a place. [step] Look up.  Look around. [substep]"
)
BRACKETS = {
    "ind": 4,
    "activity_label": "Home and Garden",
    "ctx_a": WIKIHOW,
    "ctx_b": "",
    "ctx": WIKIHOW,
    "endings": [
        "[substeps] A hook helps. [title] Hang it.",
        "Never  mind.   Go.",
        " Buy a lamp. ",
        "[step] Naïve café.",
    ],
    "label": "1",
}
LM_EVAL_CONTEXT = "Home and Garden: How to hang a lamp. Choose a place. Look up. Look around. "
"""Of BRACKETS, by hand, as are its endings. The space at the end will go to the endings."""
LM_EVAL_ENDINGS = [
    " A hook helps.. Hang it.",
    "Never mind.  Go.",
    "Buy a lamp.",
    " Naïve café.",
]


def fields_of(number, activity, sentences, begun, endings, label):
    return {
        "ind": number,
        "activity_label": activity,
        "ctx_a": sentences,
        "ctx_b": begun,
        "ctx": f"{sentences} {begun}".strip(),
        "endings": endings,
        "label": label,
        "split": "val",
    }


def write_questions_file(path, rows=None):
    """A file of the short questions, or of these rows."""
    if rows is None:
        rows = [fields_of(number, *question) for number, question in enumerate(SHORT)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
