import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm

from eyas.target.norm import FinalNorm, flavour_of

FAMILIES = {
    "llama": LlamaRMSNorm,
    "deepseek_v3": LlamaRMSNorm,
    "gemma3_text": Gemma3RMSNorm,
    "gpt_oss": GptOssRMSNorm,
    "qwen3_next": Qwen3NextRMSNorm,
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_equals_the_family_s_own_bit_by_bit(family, dtype):
    torch.manual_seed(0)
    own = FAMILIES[family](64, eps=1e-5).to(dtype)
    torch.nn.init.normal_(own.weight, 0.5)
    x = (torch.randn(5, 7, 64) * torch.logspace(-2, 3, 64)).to(dtype)
    ours = FinalNorm(own.weight.detach(), 1e-5, flavour_of(family))
    assert ours(x).dtype == dtype
    assert torch.equal(ours(x), own(x))


def test_the_weight_moves_with_the_module_but_is_not_trained():
    norm = FinalNorm(torch.ones(4), 1e-6)
    assert not list(norm.parameters()) and norm.to(torch.float64).weight.dtype == torch.float64
