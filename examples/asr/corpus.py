"""Make a small spoken corpus in AISHELL-1's folders with espeak-ng, for machines without AISHELL-1.

    python examples/asr/corpus.py --data FOLDER

What it is: synthetic English, read by the formant synthesiser espeak-ng (an apt package) without noise or room.
Sentences come from a grammar of four patterns over about sixty words whose letters are the whole alphabet, a to z;
none occurs twice. Voices differ in accent, timbre, pitch and speed, and each utterance varies pitch and speed of its
voice a little. The sentences of dev and test are not in train. dev is spoken by the voices of train; test by a voice
whose accent and timbre are not in train. It shows that a recogniser learns; it says nothing about people's speech.

The same options and the same espeak-ng give the same files, byte for byte.
"""

from __future__ import annotations

import array
import concurrent.futures
import dataclasses
import os
import random
import shutil
import subprocess
import wave
from pathlib import Path

import click
from speech.aishell import TRANSCRIPT

from hvdtrain.errors import UserError


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NUMBERS = _words("two three four five six seven eight nine ten")
QUALITIES = _words("quick lazy brown jolly vexed big warm cold happy quiet")
BEINGS = _words("foxes zebras dogs queens judges wizards pilots girls birds")
DEEDS = _words("jump walk sing play sleep work dance")
WHERE = _words("over under near behind with")
THINGS = _words("box river house garden park train bridge van kitchen jacket")
ORDERS = _words("take bring move fix")
TIMES = _words("today tomorrow now always")


@dataclasses.dataclass(frozen=True)
class Speaker:
    """A voice of espeak-ng: accent+timbre; words a minute; pitch (0 to 99)."""

    name: str
    voice: str
    speed: int
    pitch: int


TRAINING_SPEAKERS = (
    Speaker("S0001", "en-us", 155, 50),
    Speaker("S0002", "en-us+f2", 165, 55),
    Speaker("S0003", "en-gb-x-rp+m3", 150, 45),
    Speaker("S0004", "en-gb-x-rp+f5", 160, 60),
    Speaker("S0005", "en-us+m7", 170, 35),
    Speaker("S0006", "en-gb-scotland+f3", 150, 50),
    Speaker("S0007", "en-029+m1", 160, 40),
    Speaker("S0008", "en-gb-x-gbcwmd+f1", 155, 65),
)
HELD_OUT_SPEAKER = Speaker("S0101", "en-gb-x-gbclan+f4", 155, 52)


def sentence(draw: random.Random) -> str:
    """A sentence of the grammar."""
    pattern = draw.randrange(4)
    number, quality, being, deed = (draw.choice(words) for words in (NUMBERS, QUALITIES, BEINGS, DEEDS))
    where, thing, order, time = (draw.choice(words) for words in (WHERE, THINGS, ORDERS, TIMES))
    if pattern == 0:
        return f"{number} {quality} {being} {deed} {time}"
    if pattern == 1:
        return f"the {being} {deed} {where} the {quality} {thing}"
    if pattern == 2:
        return f"{order} {number} {being} to the {thing}"
    return f"{time} the {quality} {thing} is {where} the {being}"


def distinct_sentences(count: int, seed: int) -> list[str]:
    """That many different sentences, in random order."""
    draw, found = random.Random(seed), dict[str, None]()
    while len(found) < count:
        found[sentence(draw)] = None
    return list(found)


@dataclasses.dataclass(frozen=True)
class Line:
    """What is to be recorded."""

    split: str
    name: str
    speaker: Speaker
    text: str
    speed: int
    pitch: int


def plan(num_train: int, num_held_out: int, seed: int) -> list[Line]:
    """Every line of the corpus: who says what, how. A function of its arguments alone."""
    draw = random.Random(seed + 1)
    texts = iter(distinct_sentences(num_train + 2 * num_held_out, seed))
    lines = []
    for split, count, speakers in (
        ("train", num_train, TRAINING_SPEAKERS),
        ("dev", num_held_out, TRAINING_SPEAKERS),
        ("test", num_held_out, (HELD_OUT_SPEAKER,)),
    ):
        for index in range(count):
            speaker = speakers[index % len(speakers)]
            name = f"MADE{speaker.name}{split[0].upper()}{index:05d}"
            speed, pitch = speaker.speed + draw.randint(-12, 12), speaker.pitch + draw.randint(-8, 8)
            lines.append(Line(split, name, speaker, next(texts), speed, pitch))
    return lines


def record(line: Line, root: Path) -> None:
    """Write the wav of a line: one channel of 16 bits at 22,050 Hz, which is what espeak-ng makes."""
    path = root / "wav" / line.split / line.speaker.name / f"{line.name}.wav"
    path.parent.mkdir(parents=True, exist_ok=True)
    command = ["espeak-ng", "-v", line.speaker.voice, "-s", str(line.speed), "-p", str(line.pitch), "-w", str(path)]
    done = subprocess.run([*command, line.text], capture_output=True, text=True, check=False)
    if done.returncode != 0 or not path.is_file():
        raise UserError(f"{' '.join(command)} failed: {done.stderr.strip() or done.returncode}")
    cut_silence(path)


def cut_silence(path: Path) -> None:
    """Shorten the silence at the end of a wav, a third of a second, to a tenth: it would be a seventh of the corpus."""
    with wave.open(str(path), "rb") as file:
        settings, rate, content = file.getparams(), file.getframerate(), file.readframes(file.getnframes())
    samples = array.array("h", content)
    end = max((place for place, sample in enumerate(samples) if abs(sample) > 200), default=len(samples))
    with wave.open(str(path), "wb") as file:
        file.setparams(settings)
        file.writeframes(samples[: end + rate // 10].tobytes())


def make(root: Path, *, num_train: int, num_held_out: int, seed: int = 1, jobs: int = 1) -> list[Line]:
    """Write the corpus.

    Raises:
        UserError: there is no espeak-ng, or the folder holds something already.
    """
    if shutil.which("espeak-ng") is None:
        raise UserError("espeak-ng is not installed; on Debian and Ubuntu: apt-get install espeak-ng")
    if (root / "wav").exists():
        raise UserError(f"{root}/wav is there already; choose another --data or remove it")
    lines = plan(num_train, num_held_out, seed)
    # Moved into place at the end: a folder `wav` is a whole corpus, whatever interrupts this.
    making = root / ".making"
    shutil.rmtree(making, ignore_errors=True)
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        list(pool.map(record, lines, [making] * len(lines)))
    transcript = root / TRANSCRIPT
    transcript.parent.mkdir(parents=True, exist_ok=True)
    transcript.write_text("".join(f"{line.name} {line.text}\n" for line in lines), encoding="utf-8")
    (making / "wav").rename(root / "wav")
    making.rmdir()
    return lines


@click.command(help=__doc__)
@click.option("--data", required=True, type=click.Path(path_type=Path, file_okay=False), help="Folder to write.")
@click.option("--train", "num_train", default=1600, show_default=True, help="Sentences to train on.")
@click.option("--held_out", "num_held_out", default=120, show_default=True, help="Sentences of dev, and of test.")
@click.option("--seed", default=1, show_default=True)
@click.option("--jobs", default=os.cpu_count() or 1, show_default="cores")
def main(data: Path, num_train: int, num_held_out: int, seed: int, jobs: int) -> None:
    try:
        lines = make(data, num_train=num_train, num_held_out=num_held_out, seed=seed, jobs=jobs)
    except UserError as error:
        click.echo(f"error: {error}", err=True)
        raise SystemExit(error.exit_status) from None
    letters = set("".join(line.text for line in lines)) - {" "}
    print(f"wrote {len(lines):,} distinct sentences over {len(letters)} letters to {data}")


if __name__ == "__main__":
    main()
