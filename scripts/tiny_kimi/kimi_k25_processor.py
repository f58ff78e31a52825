"""What SGLang asks of Kimi-K2.5's processor: the tokenizer and the media settings. Text only."""
from types import SimpleNamespace

from transformers import AutoTokenizer
from transformers.processing_utils import ProcessorMixin


class KimiK25Processor(ProcessorMixin):
    attributes = ["tokenizer"]
    tokenizer_class = "AutoTokenizer"

    def __init__(self, tokenizer=None, **kwargs):
        self.tokenizer = tokenizer
        self.media_processor = self.image_processor = SimpleNamespace(media_proc_cfg=dict(
            patch_size=14, merge_kernel_size=2, in_patch_limit=64, patch_limit_on_one_side=16,
            fixed_output_tokens=None, image_mean=[0.5] * 3, image_std=[0.5] * 3))

    @classmethod
    def from_pretrained(cls, path, *args, **kwargs):
        return cls(AutoTokenizer.from_pretrained(path))
