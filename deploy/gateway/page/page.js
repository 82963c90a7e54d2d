// Ask the model about one image, in the v2 inference protocol with binary tensors, and show all that it says.

const CLASSES = 10;
const DEADLINE_MS = 65_000;
// What serve/models/preprocess.py answers, behind Triton's "in ensemble 'classify', ".
const CODED = /(?:^|, )([A-Z][A-Z_]+): ([^]*)/;

const element = (id) => document.getElementById(id);
let image = null;
let asking = null;

class Refusal extends Error {
  constructor(code, sentence, id, status) {
    super(sentence);
    this.code = code;
    this.status = status;
    this.id = id;
  }
}

// --- The protocol

// A request about one image: JSON, then its length in four bytes, little-endian, then its bytes.
function requestBody(bytes, outputs) {
  const inputs = [{
    name: "encoded", datatype: "BYTES", shape: [1, 1], parameters: { binary_data_size: bytes.length + 4 },
  }];
  const head = new TextEncoder().encode(JSON.stringify({ inputs, outputs }));
  const body = new Uint8Array(head.length + 4 + bytes.length);
  body.set(head);
  new DataView(body.buffer).setUint32(head.length, bytes.length, true);
  body.set(bytes, head.length + 4);
  return { headLength: head.length, body };
}

// Output name -> {shape, values}: an array of strings where it came as JSON, else the bytes.
function readTensors(buffer, headLength) {
  const head = JSON.parse(new TextDecoder().decode(buffer.slice(0, headLength)));
  let start = headLength;
  return Object.fromEntries(head.outputs.map(({ name, shape, data, parameters }) => {
    const size = parameters?.binary_data_size ?? 0;
    const values = data ?? buffer.slice(start, start + size);
    start += size;
    return [name, { shape, values }];
  }));
}

async function infer(model, bytes, outputs, signal) {
  const { headLength, body } = requestBody(bytes, outputs);
  const headers = {
    "Authorization": `Bearer ${element("key").value.trim()}`,
    "Content-Type": "application/octet-stream",
    "Inference-Header-Content-Length": String(headLength),
  };
  const started = performance.now();
  let response, buffer;
  try {
    response = await fetch(`/v2/models/${model}/infer`, { method: "POST", headers, body, signal });
    buffer = await response.arrayBuffer();
  } catch {
    signal.throwIfAborted();
    throw new Refusal("UNREACHABLE", "the gateway cannot be reached, or the key holds characters that no key has");
  }
  const milliseconds = performance.now() - started;
  if (!response.ok) {
    throw refusalOf(response, buffer);
  }
  const length = Number(response.headers.get("Inference-Header-Content-Length") ?? buffer.byteLength);
  return {
    tensors: readTensors(buffer, length),
    milliseconds,
    serverMilliseconds: 1000 * Number(response.headers.get("X-Server-Seconds")),
  };
}

function refusalOf(response, buffer) {
  const text = new TextDecoder().decode(buffer);
  let sentence = `the server answered with status ${response.status}`;
  try {
    sentence = JSON.parse(text).error;
  } catch {
    // Not from a server of ours; its status has to do.
  }
  const coded = CODED.exec(sentence);
  return new Refusal(
    coded ? coded[1] : `HTTP ${response.status}`, coded ? coded[2] : sentence, response.headers.get("X-Request-ID"),
    response.status);
}

async function sha256(buffer) {
  const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", buffer));
  return Array.from(digest, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

// --- Asking

async function ask() {
  if (!image) {
    element("file").focus();
    return;
  }
  if (!element("key").value.trim()) {
    showWaiting("Now type your API key.");
    element("key").focus();
    return;
  }
  asking?.abort();
  const own = asking = new AbortController();
  const deadline = setTimeout(() => own.abort("deadline"), DEADLINE_MS);
  setState("asking");
  try {
    await askBoth(own.signal);
  } catch (error) {
    if (own === asking) {
      showProblem(problemOf(error, own.signal));
    }
  } finally {
    clearTimeout(deadline);
    if (own === asking) {
      asking = null;
      element("ask").removeAttribute("aria-disabled");
    }
  }
}

async function askBoth(signal) {
  const bytes = new Uint8Array(await image.arrayBuffer());
  const answer = await infer("classify", bytes, [
    { name: "probabilities", parameters: { binary_data: true } },
    { name: "logits", parameters: { classification: CLASSES } },
    { name: "release" },
  ], signal);
  signal.throwIfAborted();
  showAnswer(answer);
  const seen = await inferPixels(bytes, signal);
  if (seen) {
    const digest = await sha256(seen.tensors.image.values);
    signal.throwIfAborted();
    showSeen(seen.tensors, digest, answer.tensors.release.values[0]);
  }
  setState("answered");
}

// Null for a fused release, which is one model and gives nobody its pixels.
async function inferPixels(bytes, signal) {
  try {
    return await infer("preprocess", bytes, [
      { name: "image", parameters: { binary_data: true } },
      { name: "release" },
    ], signal);
  } catch (error) {
    if (error instanceof Refusal && error.status === 404) {
      return null;
    }
    throw error;
  }
}

function problemOf(error, signal) {
  if (error instanceof Refusal) {
    return error;
  }
  if (signal.reason === "deadline") {
    return new Refusal("NO ANSWER", "the server did not answer in time");
  }
  return new Refusal("UNEXPECTED", String(error));
}

// --- Showing

function setState(state) {
  element("result").dataset.state = state;
  element("result").setAttribute("aria-busy", String(state === "asking"));
  if (state === "asking") {
    element("ask").setAttribute("aria-disabled", "true");
    if (element("answer").hidden && element("problem").hidden) {
      element("waiting").hidden = false;
      element("waiting-text").textContent = "Asking …";
    }
  }
}

function showOnly(...ids) {
  for (const id of ["waiting", "problem", "answer", "seen"]) {
    element(id).hidden = !ids.includes(id);
  }
}

// Where it stands below the form, it would come unseen.
function bringIntoView() {
  if (matchMedia("(max-width: 820px)").matches) {
    element("result").scrollIntoView();
  }
}

function showWaiting(text) {
  element("waiting-text").textContent = text;
  showOnly("waiting");
  setState("empty");
}

function showProblem({ code, message, id }) {
  element("problem-code").textContent = code;
  element("problem-sentence").textContent = message[0].toUpperCase() + message.slice(1) + (/[.!?]$/.test(message) ? "" : ".");
  element("problem-id").textContent = id ? `Request ${id}` : "";
  showOnly("problem");
  setState("refused");
  bringIntoView();
}

// Triton names classes as "<logit>:<index>:<name>", the best first.
function ranking({ probabilities, logits }) {
  const values = new Float32Array(probabilities.values);
  return logits.values.map((entry) => {
    const [, index, ...name] = entry.split(":");
    return { name: name.join(":"), probability: values[Number(index)] };
  });
}

function showAnswer({ tensors, milliseconds, serverMilliseconds }) {
  const ranks = ranking(tensors);
  element("label").textContent = ranks[0].name;
  element("probability").textContent = percent(ranks[0].probability);
  element("bars").replaceChildren(...ranks.map(barOf));
  element("round-trip").textContent = `${milliseconds.toFixed(0)} ms`;
  element("server-time").textContent = `${serverMilliseconds.toFixed(0)} ms`;
  element("release").textContent = tensors.release.values[0];
  showOnly("answer");
  bringIntoView();
}

function barOf({ name, probability }) {
  const line = document.createElement("li");
  line.dataset.probability = probability;
  const [label, track, bar, value] = ["name", "track", "bar", "value"].map((kind) => {
    const part = document.createElement("span");
    part.className = kind;
    return part;
  });
  label.textContent = name;
  bar.style.width = `${100 * probability}%`;
  track.append(bar);
  value.textContent = percent(probability);
  line.append(label, track, value);
  return line;
}

function percent(probability) {
  return 0 < probability && probability < 0.001 ? "< 0.1 %" : `${(100 * probability).toFixed(1)} %`;
}

// uint8 [1, 3, height, width] to a canvas.
function showSeen({ image: pixels, release }, digest, answered) {
  const [, , height, width] = pixels.shape;
  const planes = new Uint8Array(pixels.values);
  const size = height * width;
  const canvas = element("pixels");
  const picture = new ImageData(width, height);
  for (let at = 0; at < size; at++) {
    picture.data.set([planes[at], planes[size + at], planes[2 * size + at], 255], 4 * at);
  }
  canvas.width = width;
  canvas.height = height;
  canvas.getContext("2d").putImageData(picture, 0, 0);
  element("shape").textContent = `3 × ${height} × ${width}, RGB, 0 to 255`;
  element("sha256").textContent = digest;
  const other = release.values[0] !== answered;
  element("seen-note").hidden = !other;
  element("seen-note").textContent = other ? `These pixels were made by another release, ${release.values[0]}.` : "";
  showOnly("answer", "seen");
}

// --- Choosing

function choose(file) {
  if (!file) {
    return;
  }
  image = file;
  const preview = element("preview");
  URL.revokeObjectURL(preview.src);
  preview.src = URL.createObjectURL(file);
  preview.alt = `The image that you chose: ${file.name}`;
  preview.hidden = false;
  element("invitation").hidden = true;
  element("drop").classList.add("filled");
  element("file-line").hidden = false;
  element("file-name").textContent = `${file.name}, ${bytesOf(file.size)}`;
  ask();
}

function bytesOf(size) {
  return size < 1000 ? `${size} bytes` : size < 1e6 ? `${(size / 1e3).toFixed(0)} kB` : `${(size / 1e6).toFixed(1)} MB`;
}

// A browser shows fewer kinds of images than the server reads.
element("preview").addEventListener("error", () => {
  element("preview").hidden = true;
  element("invitation").hidden = false;
  element("drop").classList.remove("filled");
});
element("file").addEventListener("change", ({ target }) => {
  choose(target.files[0]);
  target.value = ""; // so that the same file can be chosen again
});
element("form").addEventListener("submit", (event) => {
  event.preventDefault();
  ask();
});
document.addEventListener("dragover", (event) => {
  event.preventDefault();
  element("drop").classList.add("over-it");
});
document.addEventListener("dragleave", ({ relatedTarget }) => {
  if (!relatedTarget) {
    element("drop").classList.remove("over-it");
  }
});
document.addEventListener("drop", (event) => {
  event.preventDefault();
  element("drop").classList.remove("over-it");
  choose(event.dataTransfer.files[0]);
});
document.addEventListener("paste", ({ clipboardData }) => choose(clipboardData.files[0]));

// --- The server's health, and the same from Python

async function showHealth() {
  let well = false;
  try {
    well = (await fetch("/v2/health/ready", { cache: "no-store" })).ok;
  } catch {
    // Not reached: not well.
  }
  element("health").className = `health ${well ? "good" : "bad"}`;
  element("health-text").textContent = well ? "the server is ready" : "the server is not ready";
}

element("python").textContent = `from pathlib import Path
from serve.client import HttpClient

with HttpClient("https://${location.hostname}:${location.port || 443}", api_key=…) as client:
    (answer,) = client.classify([Path("image.jpg").read_bytes()])
    print(answer.label, answer.probability, answer.release)`;
showHealth();
setInterval(showHealth, 15_000);
