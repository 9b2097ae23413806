// Asks the server. Answers come as lines of JSON: what is known so far, at the end the result or an error.

export class Refused extends Error {
  constructor(error) {
    super(error.message);
    this.problems = error.problems ?? [];
  }
}

async function post(path, body, signal) {
  let reply;
  try {
    reply = await fetch(`api/${path}`, {
      method: "POST", signal, body: JSON.stringify(body), headers: { "Content-Type": "application/json" },
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused({ message: "The server does not answer: start `foredraft ui` again." });
  }
  if (!reply.ok) throw new Refused((await reply.json().catch(() => null))?.error ?? { message: `status ${reply.status}` });
  return reply;
}

// Returns the result; `tell` takes the messages before it.
export async function ask(path, body, signal, tell = () => {}) {
  const reply = await post(path, body, signal);
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Refused({ message: "The server has ended." });
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const message = JSON.parse(line);
      if (message.error && !message.is_rough) throw new Refused(message.error);
      if (message.result && !message.is_rough) return message.result;
      tell(message);
    }
  }
}

export async function askOnce(path, body) {
  const message = await (await post(path, body)).json();
  if (message.error) throw new Refused(message.error);
  return message.result;
}

export async function choices() { return (await fetch("api/choices")).json(); }
