"""Finds when each letter of a text sounds in its recording, for the third column of a voice's lists.

    pip install numpy soundfile
    python recipes/letter_times.py data/kathleen

Reads `train.tsv` and `dev.tsv` of a folder, in which each recording stands twice: with its text in letters, then in
phonemes, as `recipes/kathleen.py` writes them. Adds a column to each line: the seconds at which each letter begins; and
writes `train-phonemes.tsv` and `dev-phonemes.tsv`, the lines in phonemes alone.

Phonemes are aligned as speech recognizers of old did it: a phoneme is two states, a Gaussian of cepstra each; between
words there may be a pause. The first alignment is even; then the best path through the states and the Gaussians of
their frames are found in turn (Viterbi training). Letters lie evenly over the phonemes of their word.
"""

import sys
from pathlib import Path

import numpy as np
import soundfile

RATE, HOP, WINDOW, BANDS, CEPSTRA, ROUNDS = 16000, 200, 800, 40, 16, 10
PAUSES, MARKS, PARTS = " ,.;-", "ˈˌː̩", 2
NEVER = np.float32(-1e9)


def mel(hertz):
    return 2595 * np.log10(1 + np.asarray(hertz) / 700)


def filters():
    """Triangles over the frequencies of a window, evenly spaced in mel."""
    edges = np.linspace(mel(60), mel(RATE / 2), BANDS + 2)
    places = mel(np.arange(WINDOW // 2 + 1) * RATE / WINDOW)
    up, down = (places - edges[:-2, None]), (edges[2:, None] - places)
    return np.maximum(0, np.minimum(up, down) / (edges[1] - edges[0])).astype(np.float32)


def features(path, bank, cosines):
    """Cepstra of every frame and how they change, and the frames' loudness."""
    samples, rate = soundfile.read(path, dtype="float32")
    assert rate == RATE, f"{path} has {rate} samples a second"
    samples = np.pad(samples, WINDOW // 2)
    frames = np.lib.stride_tricks.sliding_window_view(samples, WINDOW)[::HOP] * np.hanning(WINDOW).astype(np.float32)
    sound = np.abs(np.fft.rfft(frames)).astype(np.float32) @ bank.T
    # What is 60 dB below the loudest is as loud as that: a room has noise.
    sound = np.log(np.maximum(sound, sound.max() * 1e-3))
    cepstra = sound @ cosines.T
    padded = np.pad(cepstra, ((2, 2), (0, 0)), mode="edge")
    change = padded[4:] + 0.5 * padded[3:-1] - 0.5 * padded[1:-3] - padded[:-4]
    return np.concatenate([cepstra, change], axis=1), sound.mean(axis=1)


class Text:
    """The phonemes of a text and the pauses that may be between them, with the letter at which each begins."""

    def __init__(self, text, units):
        self.text, self.sounds, self.at = text, [0], [-1]
        for at, letter in enumerate(text):
            if letter in PAUSES and self.sounds[-1] != 0:
                self.sounds.append(0)
                self.at.append(at)
            elif letter not in PAUSES + MARKS:
                self.sounds.append(units.setdefault(letter, len(units)))
                self.at.append(at)
        if self.sounds[-1] != 0:
            self.sounds.append(0)
            self.at.append(len(text))
        parts = [(sound, part) for sound, unit in enumerate(self.sounds) for part in range(PARTS if unit else 1)]
        self.sound_of = np.array([sound for sound, _ in parts])
        self.states = np.array([self.sounds[sound] * PARTS + part for sound, part in parts])

    def even(self, loudness):
        """States of frames: pauses where it is quiet, else the phonemes, each as long as the others."""
        loud = np.flatnonzero(loudness > loudness.min() + 0.3 * (np.percentile(loudness, 95) - loudness.min()))
        spoken = self.states[self.states >= PARTS]
        states = np.zeros(len(loudness), int)
        states[loud] = spoken[np.arange(len(loud)) * len(spoken) // len(loud)]
        return states

    def best(self, scores):
        """The best path through the states, which follow each other; pauses may be left out."""
        scores = scores[:, self.states]
        frames, count = scores.shape
        skips = np.zeros(count, bool)
        skips[2:] = self.states[1:-1] < PARTS
        before, back = np.full(count, NEVER), np.zeros((frames, count), np.int8)
        before[:2] = scores[0, :2]
        for frame in range(1, frames):
            one = np.concatenate([[NEVER], before[:-1]])
            two = np.where(skips, np.concatenate([[NEVER, NEVER], before[:-2]]), NEVER)
            choices = np.stack([before, one, two])
            back[frame] = choices.argmax(axis=0)
            before = choices.max(axis=0) + scores[frame]
        state = count - 1 if before[-1] >= before[-2] else count - 2
        path = np.zeros(frames, int)
        for frame in range(frames - 1, -1, -1):
            path[frame] = state
            state -= back[frame, state]
        return path

    def begins(self, path, end):
        """The seconds at which each letter begins."""
        sounds = self.sound_of[path]
        starts = np.full(len(self.sounds) + 1, end)
        for sound in range(len(self.sounds) - 1, -1, -1):
            frames = np.flatnonzero(sounds == sound)
            starts[sound] = frames[0] * HOP / RATE if len(frames) else starts[sound + 1]
        found = dict(zip(self.at, starts))
        times, following = [0.0] * len(self.text), found.get(len(self.text), end)
        for at in range(len(self.text) - 1, -1, -1):
            if at not in found and self.text[at] in "ː̩":
                # The second half of its vowel.
                times[at] = (found[max(known for known in found if known < at)] + following) / 2
                continue
            following = times[at] = found.get(at, following)
        return np.maximum.accumulate(times)


def gaussians(frames, states, count):
    """Means and variances of the frames of each state; those of few frames are near that of all."""
    everywhere = frames.var(axis=0)
    means, variances = np.tile(frames.mean(axis=0), (count, 1)), np.tile(2 * everywhere, (count, 1))
    for state in range(count):
        own = frames[states == state]
        if len(own) > 5:
            means[state] = own.mean(axis=0)
            variances[state] = (own.var(axis=0) * len(own) + 10 * everywhere) / (len(own) + 20)
    return means, variances


def scores_of(frames, means, variances):
    """Log-probabilities of frames in each state, without their constant."""
    inverse = 1 / variances
    squares = frames**2 @ inverse.T - 2 * frames @ (means * inverse).T + (means**2 * inverse).sum(axis=1)
    return (-0.5 * (squares + np.log(variances).sum(axis=1))).astype(np.float32)


def letters(text, phonemes, begins, end):
    """Times of letters: evenly over the phonemes of their word or, where words differ, between two stops."""
    def groups(text, between):
        found = [[]]
        for at, letter in enumerate(text):
            if letter in between:
                found.append([])
            elif letter not in PAUSES:
                found[-1].append(at)
        return [group for group in found if group]

    time = np.append(begins, end)
    for between in (PAUSES, " ,.;", ",.;", ""):
        ours, theirs = groups(text, between), groups(phonemes, between)
        if len(ours) == len(theirs):
            break
    times = np.full(len(text), np.nan)
    for own, other in zip(ours, theirs):
        known = time[other + [other[-1] + 1]]
        times[own] = np.interp(np.arange(len(own)) / len(own) * len(other), np.arange(len(known)), known)
        if own[-1] + 1 < len(text):
            times[own[-1] + 1] = known[-1]
    following = end
    for at in range(len(text) - 1, -1, -1):
        following = times[at] = following if np.isnan(times[at]) else times[at]
    return np.maximum.accumulate(times)


def main(folder):
    lists = {name: [line.split("\t")[:2] for line in (folder / name).read_text(encoding="utf-8").splitlines()]
             for name in ("train.tsv", "dev.tsv")}
    spelled = lambda text: " ".join(text.lower().split())
    pairs = [(lines[at][0], spelled(lines[at][1]), spelled(lines[at + 1][1]))
             for lines in lists.values() for at in range(0, len(lines), 2)]
    bank = filters()
    cosines = np.cos(np.pi / BANDS * np.outer(np.arange(CEPSTRA), np.arange(BANDS) + 0.5)).astype(np.float32)
    found = [features(folder / name, bank, cosines) for name, _, _ in pairs]
    every = np.concatenate([frames for frames, _ in found])
    spread, middle = every.std(axis=0), every.mean(axis=0)
    frames = [(one - middle) / spread for one, _ in found]
    every = (every - middle) / spread
    units = {"": 0}
    texts = [Text(phonemes, units) for _, _, phonemes in pairs]
    states = [text.even(loudness) for text, (_, loudness) in zip(texts, found)]
    for at in range(ROUNDS):
        model = gaussians(every, np.concatenate(states), len(units) * PARTS)
        paths = [text.best(scores_of(one, *model)) for text, one in zip(texts, frames)]
        states = [text.states[path] for text, path in zip(texts, paths)]
        score = np.mean([scores_of(one, *model)[np.arange(len(one)), own].mean() for one, own in zip(frames, states)])
        print(f"round {at + 1} of {ROUNDS}: {score:.3f}")
    for name, lines in lists.items():
        alone = folder / name.replace(".tsv", "-phonemes.tsv")
        with open(folder / name, "w", encoding="utf-8") as out, open(alone, "w", encoding="utf-8") as sounds:
            for _ in range(0, len(lines), 2):
                (recording, text, phonemes), words, path = pairs.pop(0), texts.pop(0), paths.pop(0)
                end = len(path) * HOP / RATE
                begins = words.begins(path, end)
                line = lambda said, times: f"{recording}\t{said}\t{' '.join(f'{time:.3f}' for time in times)}\n"
                out.write(line(text, letters(text, phonemes, begins, end)) + line(phonemes, begins))
                sounds.write(line(phonemes, begins))


main(Path(sys.argv[1]))
