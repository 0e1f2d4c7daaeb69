// The page: asks the server's own API three times, and shows answers, figures and stored patches.
import { draw, mean } from "./kept.js";

const byId = (id) => document.getElementById(id);
const MARK = "<image>";
const state = { info: null, images: [], running: null, results: new Map(), asked: null };

function say(text, bad = false) {
  byId("status").textContent = text;
  byId("status").classList.toggle("bad", bad);
}

const size = (bytes) => {
  const units = ["B", "KiB", "MiB", "GiB"];
  let unit = 0;
  while (bytes >= 1024 && unit < units.length - 1) { bytes /= 1024; unit += 1; }
  return `${unit ? bytes.toFixed(1) : bytes} ${units[unit]}`;
};
const seconds = (value) => (value === null ? "–" : value < 1 ? `${(1000 * value).toFixed(0)} ms` : `${value.toFixed(2)} s`);

// ---- images

function load(url, name) {
  return new Promise((resolve, reject) => {
    const image = new Image();
    image.onload = () => resolve({ url, name, image });
    image.onerror = () => reject(new Error(`${name} is not an image that this browser can show`));
    image.src = url;
  });
}

const dataUrl = (file) => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(reader.result);
  reader.onerror = () => reject(new Error(`${file.name} cannot be read`));
  reader.readAsDataURL(file);
});

async function add(files) {
  for (const file of files) {
    try {
      if (!/^image\/(png|jpeg|webp|gif)$/.test(file.type)) throw new Error(`${file.name} is not a PNG, JPEG, WebP or GIF image`);
      if (state.images.length >= state.info.max_images) throw new Error(`at most ${state.info.max_images} images`);
      if (file.size > state.info.max_image_bytes) throw new Error(`${file.name} is larger than ${size(state.info.max_image_bytes)}`);
      state.images.push(await load(await dataUrl(file), file.name));
      say("");
    } catch (error) {
      say(error.message, true);
    }
  }
  showThumbs();
}

function showThumbs() {
  byId("thumbs").replaceChildren(...state.images.map((each, i) => {
    const item = document.createElement("li");
    const image = new Image();
    image.src = each.url;
    image.alt = each.name;
    const remove = document.createElement("button");
    remove.type = "button";
    remove.textContent = "×";
    remove.setAttribute("aria-label", `Remove ${each.name}`);
    remove.addEventListener("click", () => { state.images.splice(i, 1); showThumbs(); byId("files").focus(); });
    item.append(image, remove);
    return item;
  }));
}

// ---- asking

/** The question's parts, with images at their marks, or first. */
function contentOf(question, images) {
  const texts = question.split(MARK);
  const part = (each) => ({ type: "image_url", image_url: { url: each.url } });
  const text = (value) => (value ? [{ type: "text", text: value }] : []);
  if (texts.length === 1) return [...images.map(part), ...text(question)];
  if (texts.length !== images.length + 1) {
    throw new Error(`the question has ${texts.length - 1} ${MARK} marks and there are ${images.length} images`);
  }
  return texts.flatMap((value, i) => [...text(value), ...(i < images.length ? [part(images[i])] : [])]);
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (held + value).split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

async function* complete(content, choice, signal) {
  const headers = { "Content-Type": "application/json" };
  if (byId("key").value) headers.Authorization = `Bearer ${byId("key").value}`;
  const response = await fetch("v1/chat/completions", {
    method: "POST", headers, signal,
    body: JSON.stringify({
      model: state.info.model, messages: [{ role: "user", content }], temperature: 0, stream: true,
      stream_options: { include_usage: true }, max_tokens: Number(byId("tokens").value),
      foveakv: { ...choice, kept: "layers" },
    }),
  });
  if (!response.ok) {
    if (response.status === 401) byId("key-field").hidden = false;
    throw new Error((await response.json()).error.message);
  }
  for await (const event of events(response)) {
    if (event.error) throw new Error(event.error.message);
    yield event;
  }
}

const takesBudget = (name) => state.info.methods.find((each) => each.name === name)?.budget;
const has = (name) => state.info.methods.some((each) => each.name === name);

function choices() {
  const budget = Number(byId("budget").value) / 100;
  const own = (name) => ({ method: name, ...(takesBudget(name) ? { budget } : {}) });
  return [...(has("full") ? [["full", { method: "full" }]] : []),
    ["first", own(byId("first").value)], ["second", own(byId("second").value)]];
}

/** Ask with the full cache and both methods, one after the other, so that times can be compared. */
async function ask(onlyMethods = false) {
  state.running?.abort();
  const control = new AbortController();
  state.running = control;
  try {
    if (!onlyMethods) state.asked = { content: contentOf(byId("question").value, state.images), images: [...state.images] };
    const { content, images } = state.asked;
    const asked = choices().filter(([key]) => !(onlyMethods && key === "full" && state.results.has("full")));
    byId("stop").disabled = false;
    for (const [key, choice] of choices()) place(key, choice);
    for (const [key, choice] of asked) {
      say(`Answering with ${choice.method} …`);
      await answer(key, choice, content, images, control.signal);
    }
    say("Done.");
  } catch (error) {
    if (error.name !== "AbortError") say(error.message, true);
    else if (state.running === control) say("Stopped.");
  } finally {
    if (state.running === control) { state.running = null; byId("stop").disabled = true; }
  }
}

async function answer(key, choice, content, images, signal) {
  const article = byId(`result-${key}`);
  const text = article.querySelector(".answer");
  text.textContent = "";
  text.classList.remove("bad");
  state.results.delete(key);
  try {
    for await (const event of complete(content, choice, signal)) {
      text.textContent += event.choices[0]?.delta?.content ?? "";
      if (event.usage) {
        state.results.set(key, { usage: event.usage, images });
        show(key);
      }
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    text.textContent = error.message;
    text.classList.add("bad");
  }
}

// ---- results

function place(key, choice) {
  let article = byId(`result-${key}`);
  if (!article) {
    article = byId("result").content.firstElementChild.cloneNode(true);
    article.id = `result-${key}`;
    byId("results").append(article);
  }
  const share = choice.budget ? `, ${Math.round(100 * choice.budget)}%` : "";
  article.querySelector("h2").textContent = choice.method === "full" ? "Full cache" : `${choice.method}${share}`;
}

function show(key) {
  const { usage, images } = state.results.get(key);
  const own = usage.foveakv;
  const rows = [
    ["stored", `${size(own.stored_bytes)} (${(100 * own.share_of_full).toFixed(0)}% of full)`],
    ...(own.host_bytes ? [["on the host", size(own.host_bytes)]] : []),
    ["prompt", `${usage.prompt_tokens} tokens`],
    ["answer", `${usage.completion_tokens} tokens`],
    ["prefill", seconds(own.seconds.prefill)],
    ["per token", seconds(own.seconds.token)],
  ];
  byId(`result-${key}`).querySelector("dl").replaceChildren(...rows.flatMap(([name, value]) => {
    const [term, text] = [document.createElement("dt"), document.createElement("dd")];
    term.textContent = name;
    text.textContent = value;
    return [term, text];
  }));
  offerLayers(own.kept);
  showKept(key, own.kept, images);
}

function offerLayers(kept) {
  const select = byId("layer");
  const count = kept?.layers?.length ?? 0;
  if (select.options.length === count + 1) return;
  for (let layer = select.options.length - 1; layer < count; layer += 1) select.append(new Option(`layer ${layer}`, layer));
}

function showKept(key, kept, images) {
  const holder = byId(`result-${key}`).querySelector(".images");
  if (!kept) { holder.replaceChildren(); return; }
  const layer = byId("layer").value;
  const shares = layer === "" ? kept.shares : kept.layers[Number(layer)] ?? kept.shares;
  holder.replaceChildren(...images.map((each, i) => {
    const [figure, canvas, caption] = ["figure", "canvas", "figcaption"].map((name) => document.createElement(name));
    draw(canvas, each.image, kept.grids[i], shares[i]);
    const percent = `${(100 * mean(shares[i])).toFixed(0)}%`;
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `${each.name}: ${percent} of its patches are stored`);
    caption.textContent = percent;
    figure.append(canvas, caption);
    return figure;
  }));
}

// ---- start

async function useSample() {
  const sample = await (await fetch("page/sample.json")).json();
  state.images = await Promise.all(sample.images.map((url, i) => load(url, sample.captions[i])));
  byId("question").value = sample.text;
  showThumbs();
  say("Sample cards: press Ask.");
}

function listen() {
  const drop = byId("drop");
  byId("files").addEventListener("change", async (event) => { await add(event.target.files); event.target.value = ""; });
  for (const name of ["dragenter", "dragover"]) {
    document.addEventListener(name, (event) => { event.preventDefault(); drop.classList.add("over"); });
  }
  for (const name of ["dragleave", "drop"]) document.addEventListener(name, () => drop.classList.remove("over"));
  document.addEventListener("drop", (event) => { event.preventDefault(); add(event.dataTransfer.files); });
  document.addEventListener("paste", (event) => { if (event.clipboardData.files.length) add(event.clipboardData.files); });
  byId("ask").addEventListener("submit", (event) => { event.preventDefault(); ask(); });
  byId("question").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("ask").requestSubmit();
  });
  byId("stop").addEventListener("click", () => state.running?.abort());
  byId("sample").addEventListener("click", () => useSample().catch((error) => say(error.message, true)));
  byId("budget").addEventListener("input", (event) => { byId("percent").value = `${event.target.value}%`; });
  for (const id of ["budget", "first", "second"]) {
    byId(id).addEventListener("change", () => { if (state.asked) ask(true); });
  }
  byId("layer").addEventListener("change", () => {
    for (const [key, { usage, images }] of state.results) showKept(key, usage.foveakv.kept, images);
  });
}

async function start() {
  const info = await (await fetch("page/info.json")).json();
  state.info = info;
  byId("model").textContent = info.model;
  const names = info.methods.map((each) => each.name).filter((name) => name !== "full");
  for (const [id, preferred] of [["first", info.method], ["second", info.method === "snapkv" ? "hybridkv" : "snapkv"]]) {
    byId(id).append(...(names.length ? names : ["full"]).map((name) => new Option(name, name)));
    if (names.includes(preferred)) byId(id).value = preferred;
  }
  byId("tokens").max = info.max_new_tokens;
  byId("tokens").value = Math.min(64, info.max_new_tokens);
  byId("sample").hidden = !info.sample;
  listen();
  document.body.dataset.ready = "yes";
}

start().catch((error) => say(`The server cannot be reached: ${error.message}`, true));
