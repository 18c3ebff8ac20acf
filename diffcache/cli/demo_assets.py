"""CSS and JavaScript of the demo's page."""

STYLE = """
.tabs { display: flex; flex-wrap: wrap; gap: 8px; margin: 0 0 16px; }
button { font: inherit; color: var(--ink); background: none; border: 1px solid var(--line);
  border-radius: 8px; padding: 5px 12px; cursor: pointer; }
button[aria-pressed=true] { background: var(--accent); border-color: var(--accent);
  color: var(--card); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(120px, 1fr));
  gap: 14px 12px; }
.tiles figure { margin: 0; } .tiles canvas { width: 100%; display: block; background: #000; }
.tiles canvas:first-child { border-radius: 8px 8px 0 0; }
.tiles canvas + canvas { border-radius: 0 0 8px 8px; }
figcaption { font-size: 13px; line-height: 1.35; padding-top: 6px; }
figcaption b { display: block; font-weight: 600; }
.controls { display: flex; gap: 12px; align-items: center; margin: 16px 0 22px; }
.controls input { flex: 1; accent-color: var(--accent); } .controls button { min-width: 84px; }
video { position: absolute; width: 2px; height: 2px; opacity: 0; pointer-events: none; }
.clip[hidden] { display: none; } h3 { font-size: 15px; margin: 22px 0 6px; }
.lead { font-size: 17px; max-width: 72ch; }
tbody tr:nth-child(2) td { font-weight: 600; }
"""

SCRIPT = """
const clips = [...document.querySelectorAll(".clip")];
const tabs = [...document.querySelectorAll(".tabs button")];
const held = document.createElement("canvas");  // one frame for all tiles: a video runs on
let shown = 0, playing = !matchMedia("(prefers-reduced-motion: reduce)").matches;
function frameOf(clip) {
  const video = clip.querySelector("video");
  const time = video ? video.currentTime : 0;
  return Math.min(+clip.dataset.frames - 1, Math.floor(time * +clip.dataset.fps + 0.01));
}
function draw(clip) {
  const video = clip.querySelector("video"), poster = clip.querySelector("img");
  const source = video && video.readyState >= 2 ? video : poster;
  if (source === poster && !poster.complete) return;
  const full = source === video ? [video.videoWidth, video.videoHeight]
    : [poster.naturalWidth, poster.naturalHeight];
  const width = full[0] / +clip.dataset.columns, height = full[1] / 2;
  if (held.width !== full[0] || held.height !== full[1]) [held.width, held.height] = full;
  held.getContext("2d").drawImage(source, 0, 0);
  clip.querySelectorAll("canvas").forEach((canvas, i) => {
    if (canvas.width !== width) { canvas.width = width; canvas.height = height; }
    const column = i >> 1, row = i & 1;
    canvas.getContext("2d").drawImage(
      held, column * width, row * height, width, height, 0, 0, width, height);
  });
  const frame = frameOf(clip), plot = clip.querySelector(".plot");
  clip.querySelector("input").value = frame;
  clip.querySelector("output").textContent = "frame " + frame;
  if (!plot) return;
  const x = +plot.getAttribute("x") + plot.getAttribute("width") * frame / (plot.dataset.count - 1);
  const cursor = clip.querySelector(".cursor");
  cursor.setAttribute("x1", x); cursor.setAttribute("x2", x);
}
function play(on) {
  playing = on;
  clips.forEach((clip, i) => {
    const video = clip.querySelector("video");
    clip.querySelector(".controls button").textContent = on ? "Pause" : "Play";
    if (!video) return;
    if (on && i === shown) video.play().catch(() => {}); else video.pause();
  });
}
function show(index) {
  shown = index;
  clips.forEach((clip, i) => { clip.hidden = i !== index; });
  tabs.forEach((tab, i) => tab.setAttribute("aria-pressed", i === index));
  play(playing);
}
function seek(clip, frame) {
  const video = clip.querySelector("video");
  play(false);
  if (video) video.currentTime = (frame + 0.5) / +clip.dataset.fps;
}
tabs.forEach((tab, i) => tab.addEventListener("click", () => show(i)));
clips.forEach((clip) => {
  clip.querySelector(".controls button").addEventListener("click", () => play(!playing));
  const slider = clip.querySelector("input"), plot = clip.querySelector(".plot");
  slider.addEventListener("input", () => seek(clip, +slider.value));
  if (plot) plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect();
    seek(clip, Math.round((event.clientX - box.left) / box.width * (plot.dataset.count - 1)));
  });
});
function loop() { draw(clips[shown]); requestAnimationFrame(loop); }
show(0); loop();
"""
