"""Prompts of the starter model's golden: texts, with the control tokens of its chat template written out."""

from __future__ import annotations


def chat(text: str, system: str = "You are a helpful AI assistant named SmolLM, trained by Hugging Face") -> str:
    """One user's message as the starter's template renders it."""
    return f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


STARTER_PROMPTS: dict[str, str] = {
    "chat_capital": chat("What is the capital of France?"),
    "chat_sum": chat("What is 17 + 25? Answer with the number."),
    "chat_system": chat("Who are you?", system="You are a ship's cook."),
    "chat_list": chat("Name three rivers of Europe."),
    "chat_emoji": chat("Explain these signs: 🚲 🌧️ 👩‍🔧"),
    "raw_story": "The lighthouse keeper had not slept since",
    "raw_code": "def gcd(a, b):\n    while b:\n",
    "raw_chinese": "今天天气很好,",
    "raw_space": "  \n\n\tindented   text",
    "raw_one_token": "Hello",
    "raw_long": "One engine, many cards. " * 40 + "In short:",
}
