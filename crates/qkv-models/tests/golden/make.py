"""Makes `metrics.json`: what sacrebleu gives for lines that try its rules, BLEU with five tokenizers and chrF2.

    python make.py        (needs nothing but sacrebleu 2.6.0 and regex; writes the file beside this script)

The lines are written for this purpose: numbers with commas, dashes after digits, entities, quotation marks of several
kinds, Chinese between Latin letters, empty outputs, outputs shorter than four words, white space of several kinds.
"""

import json
import pathlib

from sacrebleu.metrics import BLEU, CHRF

TOKENIZERS = ["13a", "zh", "intl", "char", "none"]

CASES = {
    "equal": (["Long time, no see.", "How are you?"], ["Long time, no see.", "How are you?"]),
    "near": (
        ["The cat sat on the mat.", "I bought this camera yesterday.", "He doesn't know."],
        ["The cat is sitting on the mat.", "I bought this camera yesterday, I think.", "He does not know it."],
    ),
    "numbers": (
        ["It costs 1,234.56 dollars, or 12-13 a day.", "Pi is 3.14159.", "No. 5, 7,5 and .5", "1990-2000, 9.", "x-1 -2 3- 4"],
        ["It costs $1,234.56, or 12 - 13 a day.", "Pi is 3.14.", "No. 5; 7.5 and 0.5", "1990 - 2000, 9 .", "x - 1 -2 3-4"],
    ),
    "entities": (
        ["&quot;Hi&quot; &amp; bye &lt;b&gt;", "<skipped>a b c d", "a&amp;lt;b", "tom@example.org/path?x=1&y=2"],
        ["\"Hi\" & bye <b>", "a b c d", "a&lt;b", "tom@example.org / path ? x = 1 & y = 2"],
    ),
    "signs": (
        ["“Where?” — he asked… twice!", "(a) [b] {c} <d> `e` ~f^g_h|i\\j", "10 % of €5 = ½ €, ok™?", "l'été, qu’il a"],
        ["\"Where?\" - he asked... twice!", "( a ) [ b ] { c } < d > ` e ` ~ f ^ g _ h | i \\ j", "10% of 5 € = 0.5 €, ok?", "l' été, qu'il a"],
    ),
    "chinese": (
        ["我昨天买了这台相机。", "你买了iPhone 15手机吗？", "“好”——他说……", "价格是3.50元，打８折。"],
        ["这台相机是我昨天买的。", "你买iPhone15了吗?", "他说：“好。”", "价格是3.5元,打8折。"],
    ),
    "scripts": (
        ["こんにちは、世界！カタカナ", "Привет, мир! Как дела?", "안녕하세요 세계", "𠀀𠀁 rare 😀👍🏽 emoji", "e\u0301 é ﬁn"],
        ["こんにちは世界。カタカナ", "Привет мир! Как твои дела?", "안녕 세계", "𠀀 rare 😀 emoji 👍🏽", "é é fin"],
    ),
    "short": (["a", "b c", "d e f", ""], ["a", "b x c", "d e g", "h"]),
    "one word": (["yes"], ["yes"]),
    "three words": (["we are here"], ["we are here"]),
    "no match": (["alpha beta gamma delta"], ["one two three four"]),
    "no pair": (["one alpha two beta three"], ["one two three four five"]),
    "no three": (["a b x c d y e f z"], ["a b c d e f g h i"]),
    "nothing": (["", " "], ["a b c d", "e"]),
    "nothing for nothing": (["", "x"], ["", ""]),
    "long": (["the the the the the the the"] * 3, ["the cat is on the mat", "there is a cat on the mat", "the the"]),
    "brief": (["the cat"] * 4, ["the cat is on the mat today and tomorrow"] * 4),
    "spaces": (
        ["  two   spaces\tand a\u3000wide one  ", "a\u00a0b\u2009c\u200bd e", "one\x1ctwo\x1fthree four"],
        ["two spaces and a wide one", "a b c d e", "one two three four"],
    ),
    "case": (["the Cat SAT on The mat"], ["The cat sat on the mat"]),
}


def score(hypotheses, references):
    result = {}
    for name in TOKENIZERS:
        metric = BLEU(tokenize=name)
        bleu = metric.corpus_score(hypotheses, [references])
        result[name] = {
            "score": bleu.score,
            "precisions": bleu.precisions,
            "brevity": bleu.bp,
            "length": bleu.sys_len,
            "reference_length": bleu.ref_len,
            "words": [" ".join(metric._preprocess_segment(line).split()) for line in hypotheses + references],
            "signature": str(metric.get_signature()),
        }
    metric = CHRF()
    chrf = metric.corpus_score(hypotheses, [references])
    return {"bleu": result, "chrf": chrf.score, "chrf_signature": str(metric.get_signature())}


def main():
    everything = ([], [])
    cases = []
    for name, (hypotheses, references) in CASES.items():
        assert len(hypotheses) == len(references), name
        everything[0].extend(hypotheses)
        everything[1].extend(references)
        cases.append({"name": name, "outputs": hypotheses, "references": references, **score(hypotheses, references)})
    cases.append({"name": "everything", "outputs": everything[0], "references": everything[1], **score(*everything)})
    path = pathlib.Path(__file__).with_name("metrics.json")
    path.write_text(json.dumps({"cases": cases}, ensure_ascii=True, indent=1) + "\n")
    print(f"{len(cases)} cases")


if __name__ == "__main__":
    main()
