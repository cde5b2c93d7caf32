"""What `assigner init` writes for nobody's model in particular: a small language model, complete and runnable."""

from __future__ import annotations

from assigner.init.draft import Code, Draft, DraftOutput, MarkPattern, Tensor

_NET = '''\
VOCABULARY, LENGTH, WIDTH, BLOCKS = 256, 64, 128, 8


class Net(nn.Module):
    """Tokens (rows, length) -> scores of the next token (rows, length, vocabulary)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(BLOCKS)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Embedding, blocks that look back and not ahead, head."""
        length = tokens.size(1)
        mask = nn.Transformer.generate_square_subsequent_mask(length, tokens.device)
        x = self.embed(tokens) + self.position[:length]
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(x)
'''

EXAMPLE = Draft(
    name="net",
    made_by="assigner init",
    code=Code(definitions=_NET, body=("return Net()",)),
    takes=(Tensor("tokens", (64,), 256),),
    gives=DraftOutput("", (64, 256)),
    data=(
        "# Something to learn: counting from anywhere, in steps of 1 to 8.",
        "start = torch.randint(VOCABULARY, (rows, 1), generator=generator)",
        "stride = torch.randint(1, 9, (rows, 1), generator=generator)",
        "tokens = (start + stride * torch.arange(LENGTH + 1)) % VOCABULARY",
    ),
    marks=(MarkPattern("embed", 1), MarkPattern("blocks.*", 8), MarkPattern("head", 1)),
)
