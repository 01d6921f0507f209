"""A small Conformer encoder with a CTC head and a Transformer decoder, for joint training.

Conformer: Gulati et al. 2020, https://arxiv.org/abs/2005.08100 (here with absolute positions, and with layer
normalisation in the convolution module: the statistics of a batch would differ with the number of ranks). Joint
training: Watanabe et al. 2017, https://doi.org/10.1109/JSTSP.2017.2763455. Padding changes nothing: an utterance gives
the same scores alone and in a padded microbatch.

Shapes: N utterances, T frames of features, S = T / 4 frames after subsampling, U characters, D = `dim`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from speech.units import EDGE


@dataclasses.dataclass(frozen=True)
class ModelOptions:
    """The size of the model.

    Attributes:
        dim: width of every layer.
        num_layers: Conformer blocks of the encoder.
        num_decoder_layers: blocks of the attention decoder; 0: CTC alone.
        num_heads: attention heads; divides `dim`.
        ff_factor: width of the feed-forward layers / dim.
        kernel_size: of the depthwise convolution, odd, in frames after subsampling.
        dropout: share of units dropped.
        layer_drop: share of encoder blocks left out at random in a microbatch. Parameters of a block that is left out
            have no gradient there, so `find_unused_parameters: true` is needed with it.
    """

    dim: int = 144
    num_layers: int = 4
    num_decoder_layers: int = 1
    num_heads: int = 4
    ff_factor: int = 2
    kernel_size: int = 15
    dropout: float = 0.05
    layer_drop: float = 0.0


class Scores(NamedTuple):
    """What the model gives.

    Attributes:
        ctc: log-probabilities [N, S, units].
        num_frames: [N], how many of the S are the utterance's own.
        decoder: logits [N, U + 1, units], or None without a decoder.
    """

    ctc: Tensor
    num_frames: Tensor
    decoder: Tensor | None


class SpeechModel(nn.Module):
    """Features to scores.

    Args:
        mean, inverse_std: [num_mels], the CMVN; buffers, so that a checkpoint holds them.
        num_units: size of the output layers.
    """

    def __init__(self, mean: Tensor, inverse_std: Tensor, num_units: int, options: ModelOptions) -> None:
        super().__init__()
        self.layer_drop = options.layer_drop
        self.mean: Tensor
        self.inverse_std: Tensor
        self.register_buffer("mean", mean.clone())
        self.register_buffer("inverse_std", inverse_std.clone())
        self.subsampling = Subsampling(len(mean), options.dim, options.dropout)
        self.blocks = nn.ModuleList([ConformerBlock(options) for _ in range(options.num_layers)])
        self.ctc_head = nn.Linear(options.dim, num_units)
        self.decoder = Decoder(num_units, options) if options.num_decoder_layers else None

    def forward(self, features: Tensor, num_frames: Tensor, characters: Tensor | None = None) -> Scores:
        """Score utterances.

        Args:
            features: [N, T, num_mels]; what lies beyond num_frames [N] is not looked at.
            characters: [N, U], what was said, padded with anything, which the decoder is given; None: no decoder.
        """
        encoded, mask, lengths = self.encode(features, num_frames)
        decoded = None
        if self.decoder is not None and characters is not None:
            decoded = self.decoder(characters, encoded, mask)
        return Scores(functional.log_softmax(self.ctc_head(encoded), dim=-1), lengths, decoded)

    def encode(self, features: Tensor, num_frames: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(encoded [N, S, D], mask [N, S], lengths [N])."""
        normalised = (features - self.mean) * self.inverse_std
        x, lengths = self.subsampling(normalised, num_frames)
        mask = _mask(lengths, x.shape[1])
        for block in self.blocks:
            if self.training and self.layer_drop and torch.rand(()).item() < self.layer_drop:
                continue
            x = block(x, mask)
        return x, mask, lengths


def _mask(lengths: Tensor, size: int) -> Tensor:
    """[N, size]: True on each utterance's own frames."""
    return torch.arange(size, device=lengths.device) < lengths[:, None]


def _positions(size: int, dim: int, device: torch.device) -> Tensor:
    """[size, dim] sines and cosines (Vaswani et al. 2017)."""
    rates = torch.exp(torch.arange(0, dim, 2, device=device) * (-math.log(10000.0) / dim))
    angles = torch.arange(size, device=device)[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], dim=-1).reshape(size, dim)


class Subsampling(nn.Module):
    """Two convolutions of stride 2 over time and frequency, and a projection: a quarter of the frames."""

    def __init__(self, num_mels: int, dim: int, dropout: float, channels: int = 32) -> None:
        super().__init__()
        self.dim = dim
        self.first = nn.Conv2d(1, channels, 3, stride=2, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, stride=2, padding=1)
        self.projection = nn.Linear(channels * _half(_half(num_mels)), dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, features: Tensor, num_frames: Tensor) -> tuple[Tensor, Tensor]:
        x, lengths = features.unsqueeze(1), num_frames
        for convolution in (self.first, self.second):
            # Without the zeros an utterance's last frames would see the padding.
            x = x * _mask(lengths, x.shape[2])[:, None, :, None]
            x = functional.relu(convolution(x))
            lengths = _half(lengths)
        x = self.projection(x.transpose(1, 2).flatten(2))
        return self.dropout(x + _positions(x.shape[1], self.dim, x.device)), lengths


def _half(size: Tensor | int) -> Tensor | int:
    return (size + 1) // 2


class FeedForward(nn.Sequential):
    """Normalise, widen, narrow."""

    def __init__(self, options: ModelOptions) -> None:
        dim, inner = options.dim, options.dim * options.ff_factor
        super().__init__(
            nn.LayerNorm(dim),
            nn.Linear(dim, inner),
            nn.SiLU(),
            nn.Dropout(options.dropout),
            nn.Linear(inner, dim),
            nn.Dropout(options.dropout),
        )


class Attention(nn.Module):
    """Multi-head attention of x [N, Q, D] to memory [N, K, D]."""

    def __init__(self, options: ModelOptions) -> None:
        super().__init__()
        self.num_heads, self.dropout = options.num_heads, options.dropout
        self.norm = nn.LayerNorm(options.dim)
        self.query = nn.Linear(options.dim, options.dim)
        self.key_value = nn.Linear(options.dim, 2 * options.dim)
        self.out = nn.Linear(options.dim, options.dim)

    def forward(self, x: Tensor, memory: Tensor | None, mask: Tensor | None, *, causal: bool = False) -> Tensor:
        """Args: memory: None for x itself; mask: [N, K], True where there is something to attend to."""
        normed = self.norm(x)
        query = self._heads(self.query(normed))
        key, value = (self._heads(part) for part in self.key_value(normed if memory is None else memory).chunk(2, -1))
        given = None if mask is None else mask[:, None, None, :]
        rate = self.dropout if self.training else 0.0
        found = functional.scaled_dot_product_attention(query, key, value, given, rate, causal)
        return functional.dropout(self.out(found.transpose(1, 2).flatten(2)), rate)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


class ConvolutionModule(nn.Module):
    """Gate, depthwise convolution over time, mix."""

    def __init__(self, options: ModelOptions) -> None:
        super().__init__()
        dim = options.dim
        self.norm = nn.LayerNorm(dim)
        self.gate = nn.Linear(dim, 2 * dim)
        self.depthwise = nn.Conv1d(dim, dim, options.kernel_size, padding=options.kernel_size // 2, groups=dim)
        self.inner_norm = nn.LayerNorm(dim)
        self.out = nn.Linear(dim, dim)
        self.dropout = nn.Dropout(options.dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        gated = functional.glu(self.gate(self.norm(x)), dim=-1) * mask[..., None]
        mixed = self.depthwise(gated.transpose(1, 2)).transpose(1, 2)
        return self.dropout(self.out(functional.silu(self.inner_norm(mixed))))


class ConformerBlock(nn.Module):
    """Half a feed-forward layer, attention, convolution, the other half."""

    def __init__(self, options: ModelOptions) -> None:
        super().__init__()
        self.first, self.second = FeedForward(options), FeedForward(options)
        self.attention = Attention(options)
        self.convolution = ConvolutionModule(options)
        self.norm = nn.LayerNorm(options.dim)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + 0.5 * self.first(x)
        x = x + self.attention(x, None, mask)
        x = x + self.convolution(x, mask)
        return self.norm(x + 0.5 * self.second(x))


class Decoder(nn.Module):
    """Characters so far and the encoded utterance to the next character."""

    def __init__(self, num_units: int, options: ModelOptions) -> None:
        super().__init__()
        self.dim = options.dim
        self.embedding = nn.Embedding(num_units, options.dim)
        # Of the size that the positions have, so that neither drowns the other.
        nn.init.normal_(self.embedding.weight, std=0.5)
        self.blocks = nn.ModuleList([DecoderBlock(options) for _ in range(options.num_decoder_layers)])
        self.norm = nn.LayerNorm(options.dim)
        self.head = nn.Linear(options.dim, num_units)

    def forward(self, characters: Tensor, encoded: Tensor, mask: Tensor) -> Tensor:
        """Logits [N, U + 1, units]: row u is the guess at character u, given the ones before it."""
        given = functional.pad(characters, (1, 0), value=EDGE)
        x = self.embedding(given) + _positions(given.shape[1], self.dim, given.device)
        for block in self.blocks:
            x = block(x, encoded, mask)
        logits: Tensor = self.head(self.norm(x))
        return logits


class DecoderBlock(nn.Module):
    """Attention to the characters so far, to the utterance, feed-forward."""

    def __init__(self, options: ModelOptions) -> None:
        super().__init__()
        self.to_characters, self.to_utterance = Attention(options), Attention(options)
        self.feed_forward = FeedForward(options)

    def forward(self, x: Tensor, encoded: Tensor, mask: Tensor) -> Tensor:
        x = x + self.to_characters(x, None, None, causal=True)
        x = x + self.to_utterance(x, encoded, mask)
        return x + self.feed_forward(x)
