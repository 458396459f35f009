"use strict";
const POLL_MS = 1000, POINTS = 120, CARD_EVERY = 10;  // polls between two looks at the model's card
const MOST_BYTES = 2 ** 26;  // of an image that the server takes by default
const MOST_IMAGES = 32, AT_ONCE = 4;  // a browser opens six connections to a server; the statistics need one

const $ = (id) => document.getElementById(id);
const percent = (share) => (100 * share).toFixed(share > 0.0995 ? 1 : 2) + "\u00a0%";  // not broken from its number
const count = (number) => number.toLocaleString("en");
const short = (number) => count(+number.toFixed(number < 10 ? 1 : 0));
const cut = (label) => label.length > 300 ? label.slice(0, 300) + "…" : label;  // a word of 65,536 letters takes a minute

let model = null;  // the one that is chosen
let shown = null;  // the one whose card stands there, or is asked for
let seen = null;  // {grid, preprocessing} of its attention map; null where it serves none
let images = [];  // what was classified last
let token = sessionStorage.getItem("token");
let asking = null;  // aborts the requests that newer images replace

class Refused extends Error {
  constructor(status, text) { super(text); this.status = status; }
}

function element(tag, text, className) {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (className) node.className = className;
  return node;
}

/** The JSON of a reply; throws Refused with the server's own words. */
async function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (token) headers.Authorization = "Bearer " + token;
  const reply = await fetch(path, { ...options, headers });
  const answer = await reply.json().catch(() => ({}));
  if (reply.ok) return answer;
  const refused = new Refused(reply.status, answer.error ?? "the server answered " + reply.status);
  if (reply.status === 401) lock(refused.message);
  throw refused;
}

/* Token */

function lock(text) {
  $("locked").hidden = false;
  $("locked-error").hidden = !token;  // the first time nothing was wrong yet
  $("locked-error").textContent = text;
}

$("token-form").onsubmit = (event) => {
  event.preventDefault();
  const given = $("token").value.trim();
  if (!/^[!-~]+$/.test(given)) {
    $("locked-error").hidden = false;
    $("locked-error").textContent = "A token is visible ASCII characters alone: this one has others.";
    return;
  }
  token = given;
  sessionStorage.setItem("token", token);
  poll();
};

/* Classify */

/** The row of an image: what it looks like, and where its classes will stand. */
function rowOf(file) {
  const row = element("li"), preview = element("div", undefined, "preview"), image = element("img");
  image.alt = file.name ? "Your image, " + file.name : "Your image";
  image.src = URL.createObjectURL(file);
  image.onload = () => {
    URL.revokeObjectURL(image.src);
    image.classList.toggle("large", image.naturalHeight > 300);
  };
  image.onerror = () => image.replaceWith(element("strong", file.name || "no image"));  // the server says why
  preview.append(image);
  row.append(preview, element("div"));
  return row;
}

/** Draw a map over the part of the image that the model was given: a centred square, or all of it. */
async function showAttention(preview, values, { grid: [rows, columns], preprocessing }) {
  const image = preview.querySelector("img");
  await image.decode();  // its size is known from here on
  const { crop_mode = "center", crop_fraction } = preprocessing;
  const width = image.naturalWidth, height = image.naturalHeight;
  const side = crop_fraction * (crop_mode === "border" ? Math.max(width, height) : Math.min(width, height));
  const [wide, high] = crop_mode === "squash" ? [width * crop_fraction, height * crop_fraction] : [side, side];
  const map = element("canvas"), most = Math.max(...values) || 1;
  [map.width, map.height] = [columns, rows];
  const pixels = map.getContext("2d").createImageData(columns, rows);
  values.forEach((value, at) => pixels.data.set([0, 0, 0, Math.round(216 * (1 - value / most))], 4 * at));
  map.getContext("2d").putImageData(pixels, 0, 0);
  new ResizeObserver(() => {  // a phone is turned, a window made narrow
    const scale = Math.min(image.clientWidth / width, image.clientHeight / height);
    map.style.width = wide * scale + "px";
    map.style.height = high * scale + "px";
    map.style.left = image.offsetLeft + (image.clientWidth - wide * scale) / 2 + "px";
    map.style.top = image.offsetTop + (image.clientHeight - high * scale) / 2 + "px";
  }).observe(preview);
  map.setAttribute("role", "img");
  map.setAttribute("aria-label", "Attention of the class token to " + values.length + " patches");
  map.hidden = !$("show-attention").checked;
  preview.append(map);
}

$("show-attention").onchange = (event) => {
  for (const map of $("results").querySelectorAll("canvas")) map.hidden = !event.target.checked;
};

function listOf(predictions) {
  const list = element("ol", undefined, "predictions");
  list.append(...predictions.map(({ label, score }) => {
    const row = element("li"), track = element("span", undefined, "track"), fill = element("div", undefined, "fill");
    fill.style.width = 100 * score + "%";
    track.append(fill);
    row.append(element("span", cut(label), "label"), track, element("span", percent(score), "number"));
    return row;
  }));
  return list;
}

function refusal(text) {
  const said = element("p", text, "error");
  said.setAttribute("role", "alert");
  return said;
}

/** Whether the browser may show an image in another orientation than the model gets: it ignores a WebP's EXIF, and XMP. */
async function mayBeTurned(file) {
  const text = new TextDecoder("latin1").decode(await file.slice(0, MOST_BYTES).arrayBuffer());
  const inWebp = text.slice(8, 16) === "WEBPVP8X" && Boolean(text.charCodeAt(20) & 8);
  return inWebp || /tiff:Orientation(="|>)[2-8]/.test(text);
}

/** Fill the row of an image; its best class as text, or undefined where there is none. */
async function classify(file, row, signal) {
  const type = file.type.startsWith("image/") ? file.type : "application/octet-stream";
  const about = seen, query = model ? "?model=" + encodeURIComponent(model) + (about ? "&outputs=attention" : "") : "";
  let turned;
  try {
    turned = await mayBeTurned(file);
  } catch {  // it was changed or removed since it was chosen, or is a folder
    row.lastChild.replaceChildren(refusal("the file cannot be read: choose it again"));
    return;
  }
  try {
    const options = { method: "POST", body: file, headers: { "Content-Type": type }, signal };
    const { predictions, outputs } = await ask("v1/classify" + query, options);
    row.lastChild.replaceChildren(listOf(predictions));
    if (outputs && !turned) showAttention(row.firstChild, outputs.attention, about)
      .catch(() => {});  // the browser may not read what the server can
    return cut(predictions[0].label) + ", " + percent(predictions[0].score);
  } catch (error) {
    const text = error instanceof Refused ? error.message : "the server does not answer";
    row.lastChild.replaceChildren(refusal(text));
  }
}

async function classifyAll(files) {
  if (!files.length) return;
  images = [...files].slice(0, MOST_IMAGES);
  asking?.abort();
  const mine = asking = new AbortController(), rows = images.map(rowOf), started = performance.now();
  $("results").hidden = false;
  $("results").replaceChildren(...rows);
  $("error").hidden = files.length <= MOST_IMAGES;
  $("error").textContent = "The first " + MOST_IMAGES + " of " + files.length + " images: the page takes no more at once.";
  $("status").textContent = "";
  const best = [], queue = images.entries();
  const lane = async () => {
    for (const [at, file] of queue) {
      if (mine.signal.aborted) return;
      best[at] = await classify(file, rows[at], mine.signal);
    }
  };
  await Promise.all(Array.from({ length: AT_ONCE }, lane));
  const answered = best.filter(Boolean), took = ", answered in " + short(performance.now() - started) + " ms";
  if (mine.signal.aborted || !answered.length) return;
  $("status").textContent = (images.length === 1 ? answered[0] : answered.length + " of " + images.length + " images") + took;
}

$("file").onchange = (event) => {
  classifyAll([...event.target.files]);
  event.target.value = "";  // the same file, chosen again, may be another by then
};
document.onpaste = (event) => classifyAll(event.clipboardData.files);
document.ondragover = (event) => { event.preventDefault(); $("drop").classList.add("over"); };
document.ondragleave = (event) => { if (!event.relatedTarget) $("drop").classList.remove("over"); };
document.ondrop = (event) => {  // anywhere: a near miss must not open the image in place of the page
  event.preventDefault();
  $("drop").classList.remove("over");
  classifyAll(event.dataTransfer.files);
};

for (const button of $("examples").querySelectorAll("button")) button.onclick = async () => {
  const drawing = button.querySelector("svg").cloneNode(true), image = new Image(), canvas = element("canvas");
  canvas.width = canvas.height = 256;
  drawing.setAttribute("width", 256);
  drawing.setAttribute("height", 256);
  image.src = "data:image/svg+xml," + encodeURIComponent(new XMLSerializer().serializeToString(drawing));
  await image.decode();
  canvas.getContext("2d").drawImage(image, 0, 0);
  canvas.toBlob((png) => classifyAll([new File([png], button.ariaLabel + ".png", { type: "image/png" })]));
};

/* Model */

function certificateRows(certificate) {
  return [
    ["Flip rate", "at most " + percent(certificate.flip_rate_bound) + " with 95\u00a0% confidence; allowed "
      + percent(certificate.max_flip_rate)],
    ["Flips seen", count(certificate.flips) + " of " + count(certificate.images) + " images"],
    ["Accuracy", percent(certificate.accuracy_candidate) + " served, " + percent(certificate.accuracy_reference)
      + " in the checkpoint"],
    ["Logit error", "at most " + certificate.max_logit_error.toExponential(1) + ", at batch sizes "
      + certificate.batch_sizes.join(", ")],
  ];
}

function cardRows(about) {
  const { certificate, executable, runtime, preprocessing, precision, labels, provenance, training_metrics } = about.vitx;
  const top1 = training_metrics.top1;
  return [
    ...(certificate ? certificateRows(certificate) : []),
    ...(!certificate && typeof top1 === "number" ? [["Top-1 in training", percent(top1)]] : []),
    ["Runtime", runtime.runtime + " " + runtime.version + ", " + runtime.provider],
    ["Precision", runtime.precision],
    ...(executable && runtime.precision !== precision ? [["Judged here", executable.flips + " of " + executable.images
      + " images in another class, logit error at most " + executable.max_logit_error.toExponential(1)]] : []),
    ["Input", preprocessing.image_size + " px, " + preprocessing.interpolation],
    ["Classes", count(labels.length)],
    ["Source", provenance.source + ", " + provenance.created.slice(0, 10)],
  ];
}

function verdict({ fault, certificate }) {
  if (fault) return [fault, "bad"];
  return certificate ? ["certified: " + certificate.verdict, "good"] : ["not certified", "bad"];
}

/** The calls for the chosen model, to be copied as they stand. */
function showCalls({ name, inputs, vitx: { preprocessing } }) {
  const { host, pathname, protocol } = location, server = host + pathname.replace(/\/$/, "");
  const url = new URL("v1/classify?model=" + encodeURIComponent(name).replaceAll("'", "%27"), location).href;
  const bearer = token && '"Authorization": "Bearer TOKEN"', side = preprocessing.image_size;
  $("curl").textContent = "curl " + (token ? "-H 'Authorization: Bearer TOKEN' " : "")
    + "-H 'Content-Type: image/png' \\\n  --data-binary @image.png '" + url + "'";
  $("python").textContent = `import json, urllib.request

url = ${JSON.stringify(url)}
headers = {"Content-Type": "image/png"${token ? ", " + bearer : ""}}
with open("image.png", "rb") as image:
    request = urllib.request.Request(url, image.read(), headers)
with urllib.request.urlopen(request) as reply:
    print(json.load(reply)["predictions"])`;
  $("triton").textContent = `import numpy as np, tritonclient.http as triton

client = triton.InferenceServerClient(${JSON.stringify(server)}${protocol === "https:" ? ", ssl=True" : ""})
images = np.zeros((1, ${side}, ${side}, 3), np.uint8)  # RGB, resized
tensor = triton.InferInput(${JSON.stringify(inputs[0].name)}, images.shape, "UINT8")
tensor.set_data_from_numpy(images)
answer = client.infer(${JSON.stringify(name)}, [tensor]${token ? `, headers={${bearer}}` : ""})
print(answer.as_numpy("logits"))`;
  $("use").hidden = false;
}

async function showCard() {
  const asked = model, before = shown;
  shown = asked;
  const about = await ask("v2/models/" + encodeURIComponent(asked)).catch((error) => {
    shown = before;  // the next poll asks again
    throw error;
  });
  if (asked !== model) return;  // another one was chosen meanwhile
  const rows = cardRows(about).flatMap(([name, value]) => [element("dt", name), element("dd", value)]);
  const [text, look] = verdict(about.vitx);
  const attention = about.vitx.outputs.find((one) => one.name === "attention" && one.grid);
  seen = attention ? { grid: attention.grid, preprocessing: about.vitx.preprocessing } : null;
  showCalls(about);
  $("attention").hidden = !seen;
  $("card").replaceChildren(...rows);
  $("model-name").textContent = about.name;
  $("verdict").textContent = text;
  $("verdict").className = "badge " + look;
  document.title = about.name + " · vitx";
}

function showModels(names) {
  if (!names.includes(model)) model = names[0] ?? null;
  const options = [...$("model").options].map((option) => option.value);
  if (options.join("/") !== names.join("/")) $("model").replaceChildren(...names.map((name) => element("option", name)));
  $("models").hidden = names.length < 2;
  if (model) {
    $("model").value = model;
    return;
  }
  seen = shown = null;
  $("attention").hidden = $("use").hidden = true;
  $("card").replaceChildren();
  $("model-name").textContent = "No model is loaded";
  document.title = "vitx";
  $("verdict").textContent = $("verdict").className = "";
}

$("model").onchange = (event) => {
  model = event.target.value;
  seen = null;
  showCard().catch(() => {}).then(() => classifyAll(images));  // the next poll says what is wrong
};

/* Statistics */

const series = { throughput: [[]], latency: [[], []], queue: [[]] };  // a list of values for each line
let previous = null, polls = 0, timer = null, answered = null;  // when the statistics came last

for (const [name, lines] of Object.entries(series)) $(name + "-plot").innerHTML = `
  <div class="y" aria-hidden="true"></div>
  <svg viewBox="0 0 119 72" preserveAspectRatio="none" role="img"><path d="M0 1H119M0 36H119M0 71H119"/>
    ${lines[1] ? '<polyline class="second"/>' : ""}<polyline class="first"/></svg>
  <div class="x" aria-hidden="true"><span>2 minutes ago</span><span>1</span><span>now</span></div>`;

/** The least of 1, 2, 5, 10, 20, … (and .5, .2, …) that is not below a value; 1 for none. */
function roundTop(value) {
  const unit = 10 ** Math.floor(Math.log10(value || 1));
  return [1, 2, 5, 10].find((step) => step * unit >= value) * unit;
}

function chart(name, values, text, missed) {
  const lines = series[name], plot = $(name + "-plot"), drawn = plot.querySelectorAll("polyline");
  lines.forEach((line, index) => {
    line.push(...Array(missed).fill(0), values[index]);  // the line is at 0 while nothing was known
    line.splice(0, line.length - POINTS);
  });
  const highest = Math.max(...lines.flat()), top = roundTop(highest);
  lines.forEach((line, index) => {
    const first = POINTS - line.length;  // the present is at the right edge
    const points = line.map((value, at) => first + at + "," + (71 - 70 * value / top).toFixed(1));
    drawn[index].setAttribute("points", points.join(" "));
  });
  $(name).textContent = text;
  plot.querySelector(".y").replaceChildren(...[top, top / 2, 0].map((tick) => element("span", count(tick))));
  plot.querySelector("svg").setAttribute("aria-label", text + ", highest of the last two minutes " + short(highest));
}

function showStatistics(stats) {
  const total = (name) => stats.models.reduce((sum, one) => sum + one[name], 0);
  const now = { seconds: stats.uptime_seconds, images: total("images") };
  const passed = previous ? now.seconds - previous.seconds : 0;  // negative after a restart
  const rate = passed > 0 ? Math.max(0, now.images - previous.images) / passed : 0;
  previous = now;
  const { p50, p99 } = stats.latency_ms, time = performance.now();
  const missed = answered === null ? 0 : Math.min(POINTS, Math.max(0, Math.round((time - answered) / POLL_MS) - 1));
  answered = time;
  chart("throughput", [rate], short(rate), missed);
  chart("latency", [p99 ?? 0, p50 ?? 0], p50 === null ? "–" : short(p50) + " / " + short(p99) + " ms", missed);
  chart("queue", [total("queued")], count(total("queued")), missed);
  $("metrics").hidden = !stats.metrics_open;
  $("totals").textContent = count(stats.requests) + " requests, " + count(stats.rejected) + " refused";
}

function showState(text, good) {
  if ($("state").textContent === text) return;
  $("state").textContent = text;
  $("state").className = "badge " + (good ? "good" : "bad");
}

async function poll() {
  clearTimeout(timer);
  try {
    const stats = await ask("v1/stats", { signal: AbortSignal.timeout(5 * POLL_MS) });
    $("locked").hidden = true;
    const before = shown;
    showModels([...new Set(stats.models.map((one) => one.name))]);
    showStatistics(stats);
    if (model && (model !== before || polls % CARD_EVERY === 0)) await showCard();
    if (model && model !== before) classifyAll(images);  // the classes that stand there are of one that is gone
    polls += 1;
    showState(stats.ready ? "ready" : "not ready", stats.ready);
  } catch (error) {
    previous = null;
    polls = 0;  // who answers next may serve another model of that name
    const refused = error instanceof Refused;
    showState(refused ? (error.status === 401 ? "locked" : error.message) : "the server does not answer", false);
    if (refused && error.status === 401) return;  // until there is a token
  }
  clearTimeout(timer);
  timer = setTimeout(poll, POLL_MS);
}

poll();
