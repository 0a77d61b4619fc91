"""Options that several commands share, each written once."""

from typing import Annotated

import typer

Model = Annotated[str, typer.Argument(help="Path or pulled name.")]
MaxTokens = Annotated[int, typer.Option(help="Stop after this many tokens.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy; higher is more random.")]
TopK = Annotated[int, typer.Option(help="Keep the k most likely tokens; 0 keeps all.")]
TopP = Annotated[float, typer.Option(help="Keep the most likely tokens that reach this probability.")]
MinP = Annotated[float, typer.Option(help="Keep tokens at least this likely relative to the best.")]
RepetitionPenalty = Annotated[float, typer.Option(help="Above 1: tokens already seen get less likely.")]
Seed = Annotated[int | None, typer.Option(help="Same seed, same text.")]
Stop = Annotated[list[str] | None, typer.Option(help="End the answer at this text; may be given several times.")]
Backend = Annotated[str | None, typer.Option(help="Which kernels compute: auto, native, reference.")]
Isa = Annotated[str | None, typer.Option(help="Instruction set: auto, avx512, avx2, portable.")]
KvType = Annotated[str | None, typer.Option(help="How keys and values are stored: f16, q8, q4.")]
NoPack = Annotated[bool, typer.Option("--no-pack", help="Keep packed weights in memory only, write no pack.")]
Verify = Annotated[str | None, typer.Option(help="When the pack's checksums are read: background, eager.")]
Threads = Annotated[int | None, typer.Option(help="Threads to compute with.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object.")]
