"""Decode a split with a trained model and print the character error rate.

    python examples/asr/decode.py --data FOLDER --checkpoint RUN/checkpoints/step-XXXXXXXX.pt [--split test]

--checkpoint also takes a run's output folder, and then its newest checkpoint. With --text FILE, what was heard is
written there, in the form of a transcript.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import torch
from speech.batches import Microbatches
from speech.building import load_weights, make_model, model_options
from speech.decoding import attention_greedy, character_errors, ctc_greedy
from speech.model import SpeechModel
from speech.prepared import CMVN, UNITS, Item, PreparedSplit
from speech.units import Units

from hvdtrain.errors import UserError


def newest(checkpoint: Path) -> Path:
    """The file itself; of a run's folder, its newest checkpoint.

    Raises:
        UserError: the folder holds none.
    """
    if not checkpoint.is_dir():
        return checkpoint
    found = sorted(checkpoint.glob("checkpoints/step-*.pt"))
    if not found:
        raise UserError(f"{checkpoint} holds no checkpoints/step-*.pt")
    return found[-1]


def load_model(checkpoint: Path, cmvn: Path, num_mels: int, units: Units) -> SpeechModel:
    """The model of a checkpoint, in evaluation mode; its sizes are in the configuration that the checkpoint holds.

    Raises:
        UserError: the checkpoint is missing, damaged or of another task.
    """
    try:
        options = torch.load(checkpoint, map_location="cpu", weights_only=True)["config"]["task_options"]
    except FileNotFoundError:
        raise UserError(f"there is no checkpoint {checkpoint}") from None
    except Exception as error:
        raise UserError(f"{checkpoint}: not a checkpoint of the trainer ({error})") from None
    sizes = model_options(options.get("model") or {}, with_decoder=options.get("ctc_weight", 0.0) < 1)
    model = make_model(cmvn, num_mels, units, sizes)
    load_weights(model, checkpoint)
    return model.eval()


@torch.inference_mode()
def decode(model: SpeechModel, split: PreparedSplit, units: Units, mode: str) -> Iterator[tuple[Item, str]]:
    """(utterance, what was heard) of a whole split."""
    batches = Microbatches([split], units, max_frames=6000, seed=0)
    for index in range(len(batches)):
        batch = batches[index]
        if mode == "attention":
            texts = attention_greedy(model, batch.features, batch.num_frames, units)
        else:
            texts = ctc_greedy(model(batch.features, batch.num_frames), units)
        yield from zip(batches.items(index), texts, strict=True)


@click.command(help=__doc__)
@click.option("--data", required=True, type=click.Path(path_type=Path, file_okay=False), help="The prepared corpus.")
@click.option("--checkpoint", required=True, type=click.Path(path_type=Path), help="A file, or a run's folder.")
@click.option("--cmvn", type=click.Path(path_type=Path), help="CMVN sums; default: those that prepare.py wrote.")
@click.option("--split", default="test", show_default=True)
@click.option("--mode", type=click.Choice(["ctc", "attention"]), default="ctc", show_default=True)
@click.option("--text", type=click.Path(path_type=Path, dir_okay=False), help="Where to write what was heard.")
@click.option("--examples", default=3, show_default=True, help="Sentences to show.")
def main(
    data: Path, checkpoint: Path, cmvn: Path | None, split: str, mode: str, text: Path | None, examples: int
) -> None:
    try:
        units = Units.load(data / "prepared" / UNITS)
        prepared = PreparedSplit(data / "prepared", split)
        model = load_model(newest(checkpoint), cmvn or data / "prepared" / CMVN, prepared.num_mels, units)
        if mode == "attention" and model.decoder is None:
            raise UserError(f"{checkpoint} was trained with ctc_weight: 1 and has no decoder; use --mode ctc")
    except UserError as error:
        click.echo(f"error: {error}", err=True)
        raise SystemExit(error.exit_status) from None
    found = sorted(decode(model, prepared, units, mode), key=lambda pair: pair[0].key)
    for item, heard in found[:examples]:
        print(f"{item.key}\n  said   {item.txt}\n  heard  {heard}")
    if text is not None:
        text.write_text("".join(f"{item.key} {heard}\n" for item, heard in found), encoding="utf-8")
    for speaker in sorted({item.speaker for item, _ in found}):
        pairs = [(item.txt, heard) for item, heard in found if item.speaker == speaker]
        errors, count = character_errors(*zip(*pairs, strict=True))
        print(f"speaker {speaker}: CER {errors / count:.2%} ({errors} of {count} characters)")
    errors, count = character_errors([item.txt for item, _ in found], [heard for _, heard in found])
    print(f"{split}, {mode} greedy: CER {errors / count:.2%} ({errors} of {count} characters, {len(found)} utterances)")


if __name__ == "__main__":
    main()
