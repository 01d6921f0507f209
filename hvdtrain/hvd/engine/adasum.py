"""Adasum: adds gradients that point elsewhere, averages those that point the same way.

For two vectors: adasum(a, b) = (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b; for a power of two of them, pairwise along
a binary tree in rank order. Source: Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021.
"""

from __future__ import annotations

import torch


def adasum_pair(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Combine two vectors of one shape; dot products and norms in float64, so that tiny values do not vanish."""
    a, b = first.double(), second.double()
    flat_a, flat_b = a.reshape(-1), b.reshape(-1)
    dot = torch.dot(flat_a, flat_b).item()
    norm_a, norm_b = torch.dot(flat_a, flat_a).item(), torch.dot(flat_b, flat_b).item()
    scale_a = 1.0 - dot / (2.0 * norm_a) if norm_a > 0 else 1.0
    scale_b = 1.0 - dot / (2.0 * norm_b) if norm_b > 0 else 1.0
    return (a * scale_a + b * scale_b).to(first.dtype)


def adasum_tree(vectors: list[torch.Tensor]) -> torch.Tensor:
    """Combine a power of two of vectors, neighbours first."""
    while len(vectors) > 1:
        vectors = [adasum_pair(vectors[i], vectors[i + 1]) for i in range(0, len(vectors), 2)]
    return vectors[0]
