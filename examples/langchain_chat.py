"""LangChain's ChatOpenAI against a running server: an agent with a name, which is warm when it comes back.

    everwarm serve &
    pip install langchain-openai
    python examples/langchain_chat.py [URL]

URL is http://127.0.0.1:8080/v1 unless another is given.
"""

import sys

try:
    from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
    from langchain_openai import ChatOpenAI
except ImportError:
    sys.exit("this example needs LangChain: pip install langchain-openai")

QUESTIONS = ("What is the capital of France?", "And of Italy?", "Which of the two is older?")


def main(url: str) -> None:
    """Three turns; after each, what the server says about its cache."""
    model = ChatOpenAI(
        base_url=url,
        api_key="unused",  # or one of the server's keys
        model="smollm2",
        temperature=0,
        max_completion_tokens=60,
        stream_usage=True,
        default_headers={"X-Agent-Id": "langchain-example"},
    )
    messages: list[BaseMessage] = [SystemMessage("You answer in one short sentence.")]
    for question in QUESTIONS:
        messages.append(HumanMessage(question))
        print(f"\n> {question}")
        answer, usage = "", None
        for chunk in model.stream(messages):
            answer += str(chunk.content)
            usage = chunk.usage_metadata or usage
            print(chunk.content, end="", flush=True)
        messages.append(AIMessage(answer))
        if usage is not None:
            cached = usage.get("input_token_details", {}).get("cache_read", 0)
            print(f"\n  ({cached} of {usage['input_tokens']} prompt tokens came from the cache)")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080/v1")
