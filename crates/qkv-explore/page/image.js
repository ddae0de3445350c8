// The image view: the weights of one query (the class token or a patch) over the image, of one head or by rollout, and
// thumbnails of the same query in every head. Bright means high in both themes.

import { h, sized } from 'qkv/element';
import { weight } from 'qkv/number';
import { css, palette } from 'qkv/palette';
import { at, groupName, headName, headsIn, layerName } from 'qkv/run';
import { say } from 'qkv/say';
import { scale } from 'qkv/scale';
import { part, rolloutOf } from 'qkv/source';
import { choose } from 'qkv/state';
import { inks } from 'qkv/theme';

const largest = 420; // CSS pixels of the picture
const tiny = 46; // and of a small one
const most = 160; // small pictures; if there are more heads, only the chosen layer's are drawn

/** The image of a run as a canvas of its size. */
function painted({ width, height, points }) {
  const bytes = Uint8Array.from(atob(points), (character) => character.charCodeAt(0));
  const image = new ImageData(width, height);
  for (let i = 0; i < width * height; i++) image.data.set([bytes[3 * i], bytes[3 * i + 1], bytes[3 * i + 2], 255], 4 * i);
  const canvas = document.createElement('canvas');
  [canvas.width, canvas.height] = [width, height];
  canvas.getContext('2d').putImageData(image, 0, 0);
  return canvas;
}

function open(host, pane) {
  const { run } = pane;
  const { form } = run;
  const [down, across] = form.grid;
  const image = painted(form);
  const plain = h('canvas', { class: 'seen', role: 'img', 'aria-label': `The image, ${form.width} × ${form.height}` });
  const over = h('canvas', { class: 'seen over', tabIndex: 0, role: 'application', 'aria-roledescription': 'image', 'aria-label': 'Weights over the image: arrows move, Enter makes a patch the query' });
  const ways = h('span', { class: 'segments', role: 'group', 'aria-label': 'Which weights' });
  const slider = h('input', { type: 'range', min: 1, max: run.layers.length, step: 1, 'aria-label': 'Layers', oninput: () => choose({ depth: Number(slider.value) }) });
  const depth = h('label', { hidden: true }, 'through ', slider, h('output', {}));
  const from = h('button', { type: 'button', class: 'link', onclick: () => choose({ rows: [] }) }, 'from the class token');
  const status = h('p', { class: 'quiet status' });
  const small = h('div', { class: 'every', 'aria-label': 'Every head' });
  host.append(h('div', { class: 'knobs' }, ways, depth, from), h('div', { class: 'images' }, plain, over), status, small);
  let [values, shown, marked, look] = [null, null, null, null];

  /** The query: the selected patch or the class token. */
  const query = (state) => (state.rows[0] > 0 && state.rows[0] <= down * across ? state.rows[0] : 0);

  /** The weights of a head from one query to all tokens, the class token first. */
  async function row(index, head, token) {
    const { m, heads } = run.layers[index];
    if (head !== 'mean') return part(run, index, head, [token, token + 1], [0, m]);
    const all = await Promise.all(Array.from({ length: heads }, (_, one) => row(index, one, token)));
    return all[0].map((_, i) => all.reduce((sum, one) => sum + one[i], 0) / heads);
  }

  function size() {
    const room = Math.max(140, Math.min(largest, Math.floor((host.clientWidth - 40) / 2)));
    const ratio = form.height / form.width;
    return ratio > 1 ? [room / ratio, room] : [room, room * ratio];
  }

  function lay(context, [width, height], measure, shades) {
    context.imageSmoothingEnabled = form.width >= width;
    context.drawImage(image, 0, 0, width, height);
    const [w, t] = [width / across, height / down];
    for (let i = 0; i < down * across; i++) {
      const place = measure.at(values[i + 1]);
      context.globalAlpha = 0.12 + 0.73 * place;
      context.fillStyle = css(shades(place));
      context.fillRect((i % across) * w, Math.floor(i / across) * t, Math.ceil(w), Math.ceil(t));
    }
    context.globalAlpha = 1;
  }

  function draw(state) {
    const shades = palette(state.palette, 'dark');
    const measure = scale(state.scale, values.subarray(1));
    // Measured once: drawing may make a scroll bar appear, and both pictures have one size.
    const [width, height] = size();
    look = { shades, measure, token: query(state), size: [width, height] };
    const context = sized(plain, width, height);
    context.imageSmoothingEnabled = form.width >= width;
    context.drawImage(image, 0, 0, width, height);
    paintOver();
    pane.legend(measure, shades);
  }

  function paintOver() {
    const [width, height] = look.size;
    const context = sized(over, width, height);
    lay(context, [width, height], look.measure, look.shades);
    const [w, t] = [width / across, height / down];
    const frame = (i, color, wide) => {
      context.strokeStyle = color;
      context.lineWidth = wide;
      context.strokeRect((i % across) * w + 1, Math.floor(i / across) * t + 1, w - 2, t - 2);
    };
    if (look.token > 0) frame(look.token - 1, inks().accent, 3);
    if (marked !== null) frame(marked, inks().accent, 2);
    const who = look.token ? `patch ${run.sides[0].tokens[look.token].text}` : 'the class token';
    const own = ` · ${weight(values[0])} on the class token`;
    status.textContent = marked === null ? `${who}${own}` : `${who} attends to patch ${run.sides[0].tokens[marked + 1].text}: ${weight(values[marked + 1])}`;
  }

  function mark(patch, aloud = false) {
    if (!look || patch === marked) return;
    marked = patch;
    paintOver();
    if (aloud) say(status.textContent);
  }

  const under = (event) => {
    const box = over.getBoundingClientRect();
    const [x, y] = [Math.floor(((event.clientX - box.left) / box.width) * across), Math.floor(((event.clientY - box.top) / box.height) * down)];
    return x >= 0 && x < across && y >= 0 && y < down ? y * across + x : null;
  };
  const ask = (patch) => choose({ rows: patch === null || look.token === patch + 1 ? [] : [patch + 1] });
  over.addEventListener('pointermove', (event) => mark(under(event)));
  over.addEventListener('pointerleave', () => mark(null));
  over.addEventListener('blur', () => mark(null));
  over.addEventListener('click', (event) => ask(under(event)));
  over.addEventListener('keydown', (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: across, ArrowUp: -across }[event.key];
    if (event.key === 'Enter' && marked !== null) ask(marked);
    else if (step !== undefined && !event.shiftKey) mark(Math.min(down * across - 1, Math.max(0, (marked ?? -step) + step)), true);
    else return;
    event.preventDefault();
    event.stopPropagation();
  });

  /** A thumbnail per head for the same query; a click chooses the head. */
  async function drawSmall(state, now, request) {
    const layers = run.layers.reduce((sum, layer) => sum + layer.heads, 0) <= most ? run.layers.map((_, i) => i) : [now.index];
    const token = query(state);
    const shades = palette(state.palette, 'dark');
    const rows = await Promise.all(layers.flatMap((index) => headsIn(run.layers[index]).map(async (head) => ({ index, head, found: await row(index, head, token) }))));
    if (request !== shown) return;
    small.style.setProperty('--heads', Math.max(...layers.map((index) => headsIn(run.layers[index]).length)));
    small.replaceChildren(...rows.map(({ index, head, found }) => {
      const layer = run.layers[index];
      const name = `${layerName(layer)}, ${headName(layer, head)}`;
      const canvas = h('canvas', { 'aria-hidden': 'true' });
      const context = sized(canvas, tiny, tiny * (down / across));
      const measure = scale(state.scale, found.subarray(1));
      for (let i = 0; i < down * across; i++) {
        context.fillStyle = css(shades(measure.at(found[i + 1])));
        context.fillRect((i % across) * (tiny / across), Math.floor(i / across) * (tiny / across), Math.ceil(tiny / across), Math.ceil(tiny / across));
      }
      const chosen = index === now.index && head === now.head && !state.followed;
      return h('button', { type: 'button', class: chosen ? 'one chosen' : 'one', title: name, 'aria-label': name, onclick: () => choose({ layer: index, head, followed: false }) }, canvas);
    }));
  }

  return {
    async show(state) {
      const now = at(run, state);
      const request = shown = {};
      const token = query(state);
      const follows = state.followed && run.can.rollout;
      const deep = Math.min(run.layers.length, state.depth ?? run.layers.length);
      ways.replaceChildren(
        h('button', { type: 'button', 'data-way': 'head', 'aria-pressed': String(!follows), onclick: () => choose({ followed: false }) }, `${groupName(now.layer.group)} layer ${now.layer.index}, ${headName(now.layer, now.head)}`),
        run.can.rollout ? h('button', { type: 'button', 'data-way': 'rollout', 'aria-pressed': String(follows), onclick: () => choose({ followed: true }) }, 'rollout') : '');
      depth.hidden = !follows || run.layers.length < 2;
      slider.value = deep;
      depth.querySelector('output').textContent = ` ${deep} of ${run.layers.length} layers`;
      from.hidden = token === 0;
      pane.busy(true);
      const found = follows ? await rolloutOf(run, now.layer.group, deep, [token, token + 1]) : await row(now.index, now.head, token);
      if (request !== shown) return;
      pane.busy(false);
      values = found;
      draw(state);
      await drawSmall(state, now, request);
    },
    picture: () => over,
    numbers: () => values && {
      rows: [{ label: run.sides[0].tokens[look.token].text, members: [look.token] }],
      cols: run.sides[0].tokens.map(({ text }, i) => ({ label: text, members: [i] })),
      values,
    },
    close() { shown = null; },
  };
}

export const imageView = { tab: 'image', name: 'Image', hint: 'weights over the image', suits: (run) => run.form?.kind === 'image', open };
