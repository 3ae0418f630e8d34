"""Every error message of the project states a remedy."""

import ast
import re
from pathlib import Path

import pytest

from tests.conftest import ROOT

PROJECT_ERRORS = {"UsageError", "DataError", "CheckpointError", "NumericsError", "ResourceError", "OtherVersionError"}
# Functions that turn a system error into an error of the project: argument positions of the failed action and advice.
EXPLAINED = {"explained": (1, 2), "_convert_reader_errors": (0, 1)}
# Verbs that start a sentence or a clause; usage errors may state a requirement.
IMPERATIVES = (
    "accept average begin check choose convert copy correct decode decompress define delete divide download end "
    "exclude export fix free give install keep leave look lower move name omit pass pipe point put raise record "
    "reinstall reload remove rename repair resample restore resume run save set split start stop take train try unset "
    "update use wait write"
).split()
REMEDY = re.compile(
    rf"(^|[.:;,)X]\s+|\bor |\band |\bthen )({'|'.join(IMPERATIVES)})\b|\bmust\b|\blie(s)? between\b", re.IGNORECASE
)
# Placeholders that contain the advice: another error of the project, or a sentence built elsewhere.
ADVICE = {
    "advice",
    "ADVICE",
    "FOREIGN",
    "OTHER",
    "_no_folder_message(path)",
    "self._languages_to_use(language)",
    "_remedy(capability)",
    "_largest_preset(config, budget - other_memory)",
    "error",
    "loaded.error",
}
ADVICE |= {"'; '.join(broken)", "'; '.join(problems)", "retry", "str(error)", "WRONG_TIME"}
ADVICE |= {"str(error).replace(str(folder), str(source))"}


def message_text(node: ast.expr) -> str:
    """Return the text of a message, with formatted values in braces."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr():
            return "".join(message_text(part) for part in node.values)
        case ast.FormattedValue():
            return f"{{{ast.unparse(node.value)}}}"
        case ast.BinOp(op=ast.Add()):
            return message_text(node.left) + message_text(node.right)
    return f"{{{ast.unparse(node)}}}"


def assigned_value(node: ast.expr, tree: ast.Module) -> ast.expr:
    """Return the value of a name from its last assignment before the node, or the node itself."""
    result = node
    for line in sorted((line for line in ast.walk(tree) if isinstance(line, ast.Assign)), key=lambda a: a.lineno):
        targets = line.targets[0].elts if isinstance(line.targets[0], ast.Tuple) else line.targets
        values = line.value.elts if isinstance(line.value, ast.Tuple) else [line.value]
        pairs = zip(targets, values, strict=False) if line.lineno < node.lineno else ()
        result = next((value for name, value in pairs if ast.unparse(name) == ast.unparse(node)), result)
    return result


def error_messages(source: str) -> list[str]:
    """Return the message of every error of the project in the source, raised directly or from a system error."""
    tree, results = ast.parse(source), []
    for call in ast.walk(tree):
        name = call.func.id if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) else ""
        if name in PROJECT_ERRORS:
            results.append(message_text(call.args[0]))
        elif name in EXPLAINED:
            what, advice = (message_text(assigned_value(call.args[place], tree)) for place in EXPLAINED[name])
            results.append(f"{what}: {{reason}}. {advice}")
    return results


def message_defect(message: str) -> str | None:
    """Return the defect of a message that its text shows, or None."""
    filled = re.findall(r"\{([^{}]*)\}", message)
    if message.endswith("}") and filled and filled[-1] in ADVICE:
        return None
    plain = re.sub(r"\{.*?\}", "X", message).strip()
    if not re.search(r"[.X]$", plain):
        return "it does not end as a sentence"
    if not re.match(r"[A-ZX\"'-]", plain):
        return "it does not begin as a sentence"
    if any(advice in filled for advice in ADVICE):
        return None
    return None if REMEDY.search(plain) else "it does not say what to do"


def sources() -> list[Path]:
    folders = (ROOT / name for name in ("konkanivani", "training_scripts", "benchmarks"))
    return [path for folder in folders for path in sorted(folder.rglob("*.py"))]


def test_every_error_is_a_sentence_with_a_remedy():
    results = [(path, message) for path in sources() for message in error_messages(path.read_text(encoding="utf-8"))]
    assert len(results) > 150
    bad = [f"{path.relative_to(ROOT)}: {output}: {text}" for path, text in results if (output := message_defect(text))]
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize(
    "raised",
    [
        'raise DataError(f"{path} is broken.")',
        'raise DataError(f"{path} is broken. Mend it")',
        'raise UsageError("mend the flags.")',
        'raise CheckpointError(f"The checkpoint {path} has no use.")',
        'with explained(DataError, f"{path} cannot be read", "It is broken."):\n    pass',
        'advice = "It is broken."\nwith explained(DataError, f"{path} cannot be read", advice):\n    pass',
    ],
)
def test_negative_control_an_incomplete_message_is_detected(raised):
    (message,) = error_messages(raised)
    assert message_defect(message)
