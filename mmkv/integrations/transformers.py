"""Hugging Face Transformers: a model's static caches as slots, and an engine loop around a pool.

>>> from mmkv.integrations.transformers import ChatPool              # doctest: +SKIP
>>> with ChatPool(model, tokenizer, "/mnt/kv/chats") as chats:       # doctest: +SKIP
...     answer = chats.chat("chat-42", [{"role": "user", "content": "What is a tmpfs?"}])
...     print(answer.text)

`ChatPool` is whole, and small enough to read as an example. An engine of your own needs `layout_of`, `new_cache`,
`slot_of` and `seek`, and `by_layer` to compute a layer while the later ones are on their way.

Needs the extra `transformers`.
"""

from mmkv.integrations.caches import cache_argument, layout_of, new_cache, seek, slot_of
from mmkv.integrations.chat import Answer, ChatPool
from mmkv.integrations.fingerprint import model_string
from mmkv.integrations.streaming import by_layer, decoder_layers, streams_of

__all__ = [
    "Answer",
    "ChatPool",
    "by_layer",
    "cache_argument",
    "decoder_layers",
    "layout_of",
    "model_string",
    "new_cache",
    "seek",
    "slot_of",
    "streams_of",
]
