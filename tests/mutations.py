"""Wrong formulas that the tests must notice: `python tests/mutations.py [WORD]`.

Each mutation puts a mistake into one line of the core, in a copy of the tree, and runs the tests
that are about it: they must fail. A mutation that survives is a gap in the tests.
"""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("fedbnn", "lightning_modules", "datamodules", "tests", "conf", "pyproject.toml")


@dataclass(frozen=True)
class Mutation:
    """In `file`, `right` (which stands there once) becomes `wrong`; `tests` must then fail."""

    name: str
    file: str
    right: str
    wrong: str
    tests: tuple[str, ...]


MUTATIONS = (
    Mutation(
        "a quotient forgets to divide the information",
        "fedbnn/bayes/gaussian.py",
        "self.precision - other.precision, self.info - other.info",
        "self.precision - other.precision, self.info + other.info",
        ("tests/core/test_gaussian.py",),
    ),
    Mutation(
        "a factor that takes too much precision moves the mean the wrong way",
        "fedbnn/bayes/gaussian.py",
        "(factor.info - factor.precision * self.loc) / precision",
        "(factor.info + factor.precision * self.loc) / precision",
        ("tests/core/test_gaussian.py", "tests/core/test_folds.py"),
    ),
    Mutation(
        "the divergence of scales has the wrong gradient",
        "fedbnn/bayes/inference.py",
        "growth.mul_(weights[here])",
        "growth.neg_().mul_(weights[here])",
        ("tests/core/test_kl.py", "tests/core/test_inference.py"),
    ),
    Mutation(
        "the divergence of means is not in units of the prior",
        "fedbnn/bayes/inference.py",
        "(loc[here] - prior.loc[here]).div_(scale)",
        "loc[here] - prior.loc[here]",
        ("tests/core/test_kl.py",),
    ),
    Mutation(
        "a posterior from moments forgets to take the square of the mean off",
        "fedbnn/methods/posterior_fold.py",
        "mean_square - shift.square() if self.spread",
        "mean_square if self.spread",
        ("tests/core/test_folds.py", "tests/core/test_fold_invariants.py"),
    ),
    Mutation(
        "class posteriors forget that their means have moved",
        "fedbnn/heads/posteriors.py",
        "moment - sums.T @ fresh + gap.T @ gap",
        "moment - sums.T @ fresh",
        ("tests/core/test_class_posteriors.py",),
    ),
    Mutation(
        "what a map leaves over is no uncertainty",
        "fedbnn/heads/anchor.py",
        "self.moments.carried(drift, known.scatter, known.weight)",
        "self.moments.carried(drift, known.scatter)",
        ("tests/core/test_class_posteriors.py",),
    ),
    Mutation(
        "FCIL's clients learn from the other old model",
        "fedbnn/methods/glfc.py",
        "BEST if moved else OLD",
        "OLD if moved else BEST",
        ("tests/methods/baselines/test_fcil.py",),
    ),
    Mutation(
        "the server's means are not asked about a class of one client",
        "fedbnn/heads/gaussian.py",
        "checks.apart_in_means(anchored, self._met(state))",
        "checks.apart_in_means(anchored)",
        ("tests/defense/test_statistics.py",),
    ),
    Mutation(
        "SCAFFOLD corrects with the wrong sign",
        "fedbnn/methods/scaffold.py",
        "weight.grad.add_(self.shift[name])",
        "weight.grad.sub_(self.shift[name])",
        ("tests/methods/baselines/test_scaffold.py",),
    ),
    Mutation(
        "SCAFFOLD's control forgets how many steps there were",
        "fedbnn/methods/scaffold.py",
        "(self.start[name] - weights[name]) / (steps * lr)",
        "(self.start[name] - weights[name]) / lr",
        ("tests/methods/baselines/test_scaffold.py",),
    ),
    Mutation(
        "a proximal term pushes away",
        "fedbnn/methods/base.py",
        "weight.grad.addcmul_(strength.clamp(max=1 / lr), weight.detach() - anchor)",
        "weight.grad.addcmul_(strength.clamp(max=1 / lr), anchor - weight.detach())",
        ("tests/methods/baselines",),
    ),
    Mutation(
        "EWC's importance is a mean gradient, not a mean square",
        "fedbnn/methods/importance.py",
        'torch.einsum("i,i...->...", weight, gradient.square())',
        'torch.einsum("i,i...->...", weight, gradient.abs())',
        ("tests/methods/baselines/test_importance.py",),
    ),
    Mutation(
        "LwF forgets T^2",
        "fedbnn/methods/lwf.py",
        "return self.temperature**2 * divergence",
        "return divergence",
        ("tests/methods/baselines/test_lwf.py",),
    ),
    Mutation(
        "the server's momentum forgets the past",
        "fedbnn/methods/aggregation.py",
        "found[first] = move = 0.9 * mean + move",
        "found[first] = move = 0.9 * move",
        ("tests/methods/baselines/test_server_step.py",),
    ),
    Mutation(
        "the server's step does not know its length",
        "fedbnn/methods/aggregation.py",
        "found[site] = start + self.lr * move",
        "found[site] = start + move",
        ("tests/methods/baselines/test_server_step.py",),
    ),
    Mutation(
        "what is printed in the paper is damped",
        "fedbnn/methods/__init__.py",
        '"fedbnn_paper": Preset(FedBNN, {**PRINTED, **PRODUCT})',
        '"fedbnn_paper": Preset(FedBNN, {**PRINTED, **DAMPED})',
        ("tests/core/test_presets.py",),
    ),
    Mutation(
        "images of a warm-up count twice",
        "lightning_modules/svi_client.py",
        'loc = torch.cat([state["backbone"], assembly.rows.reshape(-1)])',
        'loc = torch.cat([state["backbone"], warmed.reshape(-1)])',
        ("tests/core/test_client.py",),
    ),
    Mutation(
        "Focus-on-Now counts clients",
        "fedbnn/evaluation/evaluate.py",
        "accuracy * int(mine.sum())",
        "accuracy * len(images) * share",
        ("tests/observe/test_evaluation.py",),
    ),
    Mutation(
        "an oracle of one round",
        "fedbnn/evaluation/evaluate.py",
        "self.posteriors(state, pool.train(round, 0))",
        "self.posteriors(state, self.stream.train(round, 0))",
        ("tests/core/test_oracle.py",),
    ),
    Mutation(
        "an untrusted client counts more",
        "fedbnn/defense/robust.py",
        "return min(1.0, max(0.0, 2.0 - pull / cap))",
        "return min(1.0, max(0.0, pull / cap))",
        ("tests/defense/test_robust.py",),
    ),
    Mutation(
        "the name of a committed round may be lost in a power cut",
        "fedbnn/storage/files.py",
        "        shutil.rmtree(aside, ignore_errors=True)\n    sync(target.parent)\n",
        "        shutil.rmtree(aside, ignore_errors=True)\n",
        ("tests/storage/test_durability.py",),
    ),
    Mutation(
        "what a file holds may be lost in a power cut",
        "fedbnn/storage/files.py",
        "        os.fsync(file.fileno())\n",
        "",
        ("tests/storage/test_durability.py",),
    ),
)


def broken(mutation: Mutation, tree: Path) -> None:
    """Put the mistake into a tree; the right line must stand there, once."""
    file = tree / mutation.file
    text = file.read_text()
    if (count := text.count(mutation.right)) != 1:
        raise ValueError(f"{mutation.file}: {mutation.right!r} stands there {count} times")
    file.write_text(text.replace(mutation.right, mutation.wrong))


def noticed(mutation: Mutation) -> bool:
    """Whether the tests fail on a copy of the tree with the mistake."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for name in COPIED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, tree / name)
        broken(mutation, tree)
        command = [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", "-n", "0"]
        words = ["-m", "not slow", *mutation.tests]
        done = subprocess.run([*command, *words], cwd=tree, capture_output=True, check=False)
    return done.returncode == 1


def chosen(word: str) -> Iterator[Mutation]:
    """The mutations whose name or file has the word in it."""
    return (one for one in MUTATIONS if word in one.name or word in one.file)


def main() -> int:
    """Try them; the number that survived."""
    survived = 0
    for mutation in chosen(sys.argv[1] if len(sys.argv) > 1 else ""):
        caught = noticed(mutation)
        survived += not caught
        verdict = "noticed " if caught else "SURVIVED"
        print(f"{verdict}  {mutation.file}: {mutation.name}", flush=True)
    return survived


if __name__ == "__main__":
    sys.exit(main())
