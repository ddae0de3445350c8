// The sound view: the spectrogram above, the transcribed words at the side, and the attention between them. One word is
// marked, with its time. Weights are those of a head, or the mean of the heads that follow the sound.

import { h, sized } from 'qkv/element';
import { weight } from 'qkv/number';
import { palette } from 'qkv/palette';
import { at, headName, layerName } from 'qkv/run';
import { say } from 'qkv/say';
import { pixelsOf, scale, stamp, tint } from 'qkv/scale';
import { part } from 'qkv/source';
import { choose } from 'qkv/state';
import { inks, theme } from 'qkv/theme';

const high = 132; // CSS pixels of the spectrogram
const line = 20; // height of a word's row
const ticks = 22; // height of the time labels in between
const type = 13;

/** The spectrogram as a canvas, one pixel per band and frame. */
function painted({ frames, points }, shades) {
  const bytes = Uint8Array.from(atob(points), (character) => character.charCodeAt(0));
  const bands = bytes.length / frames;
  const image = new ImageData(frames, bands);
  const pixels = new Uint32Array(image.data.buffer);
  for (let frame = 0; frame < frames; frame++) {
    for (let band = 0; band < bands; band++) pixels[(bands - 1 - band) * frames + frame] = shades[bytes[frame * bands + band]];
  }
  return stamp(image);
}

const seconds = (milliseconds) => (milliseconds / 1000).toFixed(2);

function open(host, pane) {
  const { run } = pane;
  const { form } = run;
  const long = form.frames * form.frame; // milliseconds
  const there = Math.min(run.sides[form.side].count, Math.max(1, Math.ceil(long / form.step))); // positions of the sound itself
  const ways = h('span', { class: 'segments', role: 'group', 'aria-label': 'Which weights' });
  const canvas = h('canvas', { class: 'sound', tabIndex: 0, role: 'application', 'aria-roledescription': 'sound', 'aria-label': 'Words against time: arrows up and down choose a word' });
  const status = h('p', { class: 'quiet status' });
  host.append(h('div', { class: 'knobs' }, ways), h('div', { class: 'sounds' }, canvas), status);
  let [values, shown, size, look, marked, follows, before] = [null, null, null, null, 0, form.heads.length > 0, null];

  /** The weights of the words: the mean over their tokens, `[words, there]`. */
  async function weights(index, head) {
    const { n, m, heads } = run.layers[index];
    const all = head === 'mean'
      ? await Promise.all(Array.from({ length: heads }, (_, one) => part(run, index, one, [0, n], [0, m])))
      : [await part(run, index, head, [0, n], [0, m])];
    const found = new Float32Array(form.words.length * there);
    form.words.forEach(({ from, to }, word) => {
      for (const rows of all) {
        for (let row = from; row < to; row++) {
          for (let x = 0; x < there; x++) found[word * there + x] += rows[row * m + x] / (all.length * (to - from));
        }
      }
    });
    return found;
  }

  async function following() {
    const all = await Promise.all(form.heads.map(([index, head]) => weights(index, head)));
    return all[0].map((_, i) => all.reduce((sum, one) => sum + one[i], 0) / all.length);
  }

  function draw(state) {
    const shades = palette(state.palette, theme());
    const measure = scale(state.scale, values);
    look = { table: pixelsOf(shades), measure };
    paint();
    pane.legend(measure, shades);
  }

  function paint() {
    if (!look) return;
    const ink = inks();
    const rule = canvas.getContext('2d');
    rule.font = `${type}px ${ink.font}`;
    const left = Math.ceil(Math.max(30, ...form.words.map(({ text }) => rule.measureText(text).width))) + 14;
    const width = Math.max(left + 240, host.clientWidth - 4);
    const [across, top] = [width - left - 2, high + ticks];
    size = { left, across, top };
    const context = sized(canvas, width, top + line * form.words.length + 4);
    context.imageSmoothingEnabled = true;
    context.drawImage(painted(form, look.table), left, 0, across, high);
    context.imageSmoothingEnabled = false;
    if (form.words.length) context.drawImage(stamp(tint(values, there, form.words.length, look.measure, look.table)), left, top, across, line * form.words.length);
    const x = (milliseconds) => left + (Math.min(milliseconds, long) / long) * across;
    context.font = `${type}px ${ink.font}`;
    context.textBaseline = 'middle';
    const step = [100, 200, 500, 1000, 2000, 5000].find((each) => (each / long) * across >= 44) ?? 10000;
    context.textAlign = 'center';
    context.fillStyle = ink.quiet;
    for (let time = 0; time <= long - step / 3; time += step) context.fillText(seconds(time).replace(/0$/, ''), Math.max(left + 12, x(time)), high + ticks / 2);
    context.textAlign = 'right';
    form.words.forEach(({ text }, word) => {
      context.fillStyle = word === marked ? ink.accent : ink.text;
      context.fillText(text, left - 9, top + (word + 0.5) * line);
    });
    const word = form.words[marked];
    if (!word) { status.textContent = ''; return; }
    context.strokeStyle = ink.accent;
    context.lineWidth = 2;
    const [from, to] = [x(word.start), Math.max(x(word.start) + 3, x(word.end))];
    context.strokeRect(from, 1, to - from, high - 2);
    context.strokeRect(from, top + marked * line, to - from, line);
    context.globalAlpha = 0.35;
    context.lineWidth = 1;
    context.beginPath();
    for (const edge of [from, to]) {
      context.moveTo(edge, high);
      context.lineTo(edge, top + marked * line);
    }
    context.stroke();
    context.globalAlpha = 1;
    let inside = 0;
    for (let position = 0; position < there; position++) {
      const time = (position + 0.5) * form.step;
      if (time >= word.start && time < word.end) inside += values[marked * there + position];
    }
    status.textContent = `${word.text}: ${seconds(word.start)} to ${seconds(word.end)} s, with ${weight(inside)} of the weight`;
  }

  function mark(word, aloud = false) {
    if (word === null || word === marked) return;
    marked = word;
    paint();
    if (aloud) say(status.textContent);
  }

  const under = (event) => {
    const y = event.clientY - canvas.getBoundingClientRect().top;
    const time = ((event.clientX - canvas.getBoundingClientRect().left - size.left) / size.across) * long;
    const word = y >= size.top ? Math.floor((y - size.top) / line) : form.words.findIndex(({ start, end }) => time >= start && time < end);
    return word >= 0 && word < form.words.length ? word : null;
  };
  canvas.addEventListener('pointermove', (event) => mark(under(event)));
  canvas.addEventListener('click', (event) => {
    const word = under(event);
    if (word !== null) choose({ rows: [form.words[word].from] });
  });
  canvas.addEventListener('keydown', (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step === undefined || event.shiftKey || !form.words.length) return;
    mark(Math.min(form.words.length - 1, Math.max(0, marked + step)), true);
    event.preventDefault();
    event.stopPropagation();
  });

  return {
    async show(state) {
      const now = at(run, state);
      const request = shown = {};
      // Whoever chooses a head wants to see that one.
      if (before && (before.index !== now.index || before.head !== now.head)) follows = false;
      before = now;
      const way = (name, text, on, go) => h('button', { type: 'button', 'data-way': name, 'aria-pressed': String(on), onclick: () => { follows = go; this.show(state); } }, text);
      ways.replaceChildren(
        form.heads.length ? way('following', `${form.heads.length} heads that follow the sound`, follows, true) : '',
        way('head', `${layerName(now.layer)}, ${headName(now.layer, now.head)}`, !follows, false));
      pane.busy(true);
      const found = follows ? await following() : await weights(now.index, now.head);
      if (request !== shown) return;
      pane.busy(false);
      values = found;
      const chosen = form.words.findIndex(({ from, to }) => state.rows.some((row) => row >= from && row < to));
      if (chosen >= 0) marked = chosen;
      draw(state);
    },
    picture: () => canvas,
    numbers: () => values && {
      rows: form.words.map(({ text, from, to }) => ({ label: text, members: Array.from({ length: to - from }, (_, i) => from + i) })),
      cols: Array.from({ length: there }, (_, i) => ({ label: seconds(i * form.step), members: [i] })),
      values,
    },
    close() { shown = null; },
  };
}

export const soundView = { tab: 'sound', name: 'Sound', hint: 'words against time', suits: (run, layer) => run.form?.kind === 'sound' && layer.keys === run.form.side, open };
