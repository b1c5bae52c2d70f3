// A conversation: a tree of messages, because an edited question or a repeated answer is another branch. Nothing here
// touches the page or the network.
//
// A node is {id, parent, role, content, ...}; `parent` is "" for the first message. `chosen` has, for each node (and ""),
// the child that is shown. A user's node has `content`. An assistant's node also has `reasoning`, `calls` (tool calls),
// `state` ("running", "done", "stopped" or "failed"), `finish`, `error`, `requestId`, `measured` and `placements` (its
// time line), and `waking` if it has waited for the model to wake. A tool's node has `callId`.

export function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(9)), (byte) => byte.toString(36).padStart(2, "0")).join("");
}

/** Creates an empty conversation, with the settings of another one. */
export function newConversation(model, like = null) {
  return {
    id: newId(),
    title: "",
    updated: Date.now(),
    model,
    system: like?.system ?? "",
    tools: like?.tools ?? "",
    sampling: { ...like?.sampling },
    nodes: {},
    chosen: {},
  };
}

/** Adds a message below `parent` and shows it. Returns its node. */
export function addNode(conversation, parent, fields) {
  const node = { id: newId(), parent, content: "", ...fields };
  conversation.nodes[node.id] = node;
  conversation.chosen[parent] = node.id;
  conversation.updated = Date.now();
  if (!conversation.title && node.role === "user") conversation.title = titleOf(node.content);
  return node;
}

/** Adds an answer that is about to come. */
export function addAnswer(conversation, parent, fields) {
  return addNode(conversation, parent, {
    role: "assistant",
    reasoning: "",
    calls: [],
    state: "running",
    finish: "",
    error: "",
    ...fields,
  });
}

/** The messages that are shown, first to last. */
export function shown(conversation) {
  const nodes = [];
  for (let id = conversation.chosen[""]; id; id = conversation.chosen[id]) nodes.push(conversation.nodes[id]);
  return nodes;
}

/** The messages from the first one to this one. */
export function upTo(conversation, id) {
  const nodes = [];
  for (let node = conversation.nodes[id]; node; node = conversation.nodes[node.parent]) nodes.unshift(node);
  return nodes;
}

/** The ids of a message and its alternatives, oldest first. */
export function siblings(conversation, node) {
  return Object.values(conversation.nodes)
    .filter((one) => one.parent === node.parent)
    .map((one) => one.id);
}

/** Shows another alternative of a message. */
export function choose(conversation, node, id) {
  conversation.chosen[node.parent] = id;
}

/** The messages of a request for the answer below node `id`, as the API takes them. */
export function messagesFor(conversation, id) {
  const messages = upTo(conversation, id).filter(saysSomething).map(toMessage);
  return conversation.system.trim() ? [{ role: "system", content: conversation.system }, ...messages] : messages;
}

// An answer that failed before its first token is left out.
function saysSomething(node) {
  return node.role !== "assistant" || node.content !== "" || node.calls.length > 0;
}

function toMessage(node) {
  if (node.role === "user") return { role: "user", content: node.content };
  if (node.role === "tool") return { role: "tool", tool_call_id: node.callId, content: node.content };
  const message = { role: "assistant", content: node.content || null };
  if (node.calls.length) message.tool_calls = node.calls;
  else message.content = node.content;
  return message;
}

/** Adds a delta of the API to an answer. */
export function applyDelta(node, delta) {
  if (delta.content) node.content += delta.content;
  if (delta.reasoning_content) node.reasoning += delta.reasoning_content;
  for (const { index, id, function: called } of delta.tool_calls ?? []) {
    node.calls[index] ??= { id, type: "function", function: { name: called.name, arguments: "" } };
    node.calls[index].function.arguments += called.arguments ?? "";
  }
}

/** The calls of an answer that have no result yet, if it is the last message shown. */
export function openCalls(conversation, node) {
  return node.role === "assistant" && node.state === "done" && !conversation.chosen[node.id] ? node.calls : [];
}

function titleOf(text) {
  const line = text.trim().split("\n", 1)[0];
  return line.length > 60 ? `${line.slice(0, 59)}…` : line || "Untitled";
}
