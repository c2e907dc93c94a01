"""The target's tokenizer and chat template: the only way text becomes ids."""

from typing import Any

from eyas.errors import EyasError
from eyas.target.spec import TargetSpec


def load_tokenizer(spec: TargetSpec, trust_remote_code: bool = False) -> Any:
    """The target's tokenizer, without the model. Raises EyasError if it does not load or has no chat template."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(spec.path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError) as e:
        hint = "set target.trust_remote_code if the tokenizer comes with code you have read"
        raise EyasError(f"{spec.path}: the tokenizer does not load ({type(e).__name__}: {e})", hint) from e
    if not tokenizer.chat_template:
        hint = "use an instruct model, or add a chat_template.jinja"
        raise EyasError(f"{spec.path}: the tokenizer has no chat template", hint)
    return tokenizer
