// The map view of one head, for inputs too long to draw whole. `camera` owns the viewport, `hands` the input, `edges`
// the decorations; this module draws tiles and describes the weight under the pointer.

import { Camera, edge } from 'qkv/camera';
import { drawEdges, drawMini, drawScaleBar, near } from 'qkv/edges';
import { h, sized } from 'qkv/element';
import { hands } from 'qkv/hands';
import { point } from 'qkv/hover';
import { count, weight } from 'qkv/number';
import { palette } from 'qkv/palette';
import { at, headName, headsIn, layerName, written } from 'qkv/run';
import { say } from 'qkv/say';
import { colors, evenly, paint, scale, stamp } from 'qkv/scale';
import { part, tokensOf } from 'qkv/source';
import { choose } from 'qkv/state';
import { inks, theme } from 'qkv/theme';
import { side, Tiles } from 'qkv/tiles';
import { tip } from 'qkv/tip';

const clickable = 4; // pixels per weight from which a click opens that weight
const cheap = 8192; // tokens up to which neighboring heads are prefetched
const rest = 140; // ms until a resting pointer requests its weight

function open(host, pane) {
  const { run } = pane;
  const canvas = h('canvas', { class: 'world', tabIndex: 0, role: 'application', 'aria-roledescription': 'map' });
  const mini = h('canvas', { class: 'mini', 'aria-hidden': 'true' });
  const badge = h('span', { class: 'badge', hidden: true, title: 'computed from a sample of rows; the exact tile is loading' }, 'sampled');
  const note = h('div', { class: 'tip', hidden: true });
  const button = (text, label, act) => h('button', { type: 'button', 'aria-label': label, title: label, onclick: act }, text);
  const frame = h('div', { class: 'map' }, canvas, mini, badge, h('div', { class: 'zoom' },
    button('+', 'Zoom in', () => zoomBy(2)), button('−', 'Zoom out', () => zoomBy(0.5)), button('⤢', 'The whole matrix', () => { camera.go(null); moved(); })), note);
  host.append(frame);

  const tiles = new Tiles(run, () => repaint(), (error) => pane.refuse(error));
  let [state, layer, index, head] = [null, null, 0, 0];
  let [camera, stands] = [null, null]; // the camera, and its last place in the URL
  let [color, painted] = [null, new Map()]; // the current colors; a tile's values → its picture in those colors
  let tokens = { rows: [0, []], cols: [0, []] };
  let [pointer, ghost] = [null, null]; // the position of our own pointer, in pixels; the weight under the other pane's
  let [waiting, saving, resting] = [0, 0, 0];

  const whole = () => ({ layer: index, head, zoom: 0, x: 0, y: 0, pool: state.pool });
  const inSight = (zoom) => camera.tiles(zoom).map((tile) => ({ layer: index, head, pool: state.pool, ...tile }));

  // ── moving ────────────────────────────────────────────────────────────────────────────────────────────────────────────────

  function moved() {
    repaint();
    clearTimeout(saving);
    saving = setTimeout(() => {
      stands = String(camera.place);
      choose({ at: camera.whole ? null : camera.place });
      say(`around query ${count(Math.round(camera.row))}, key ${count(Math.round(camera.col))}`);
    }, 250);
  }

  function zoomBy(factor, x, y) {
    camera.zoom(factor, x, y);
    moved();
  }

  function openCell(cell) {
    if (cell && run.can.pair) choose({ cell: [cell.row, cell.col] }, { push: true });
  }

  const stop = hands(canvas, {
    pan: (x, y) => { camera.pan(x, y); moved(); },
    zoom: zoomBy,
    click: (x, y) => { if (camera.pixels >= clickable) openCell(camera.under(x, y)); },
    enter: () => openCell({ row: Math.min(layer.n - 1, Math.floor(camera.row)), col: Math.min(layer.m - 1, Math.floor(camera.col)) }),
    hover: (place) => { pointer = place; tell(); repaint(); },
  });

  // ── colors ────────────────────────────────────────────────────────────────────────────────────────────────────────────────

  /** Colors relative to the largest weight seen so far in this head, so that they do not flicker. */
  function tint(zoom, seen) {
    const key = [index, head, state.pool, state.scale, state.palette, theme(), state.pool === 'mean' ? zoom : ''].join('/');
    const here = seen.map((tile) => tiles.get(tile)).filter(Boolean);
    const known = here.length ? here : [tiles.get(whole())].filter(Boolean);
    const before = color?.key === key ? color.most : 0;
    const most = Math.max(before, ...known.map((tile) => tile.most));
    if (color?.key === key && most <= before * 1.001) return;
    const sample = state.scale !== 'rank' ? [] : (state.pool === 'mean' ? known[0] : tiles.get(whole()) ?? known[0])?.values ?? [];
    const measure = scale(state.scale, sample, { most, floor: evenly(layer.m) });
    const shades = palette(state.palette, theme());
    color = { key, most, table: colors(measure, shades) };
    painted = new Map();
    pane.legend(known.length ? measure : null, shades);
  }

  function picture(tile) {
    const known = tiles.get(tile);
    if (!known) return null;
    if (painted.size > 256) painted.clear();
    if (!painted.has(known.values)) painted.set(known.values, stamp(paint(known.values, side, side, color.table)));
    return painted.get(known.values);
  }

  // ── drawing ───────────────────────────────────────────────────────────────────────────────────────────────────────────────

  function repaint() {
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(draw);
  }

  function draw() {
    if (!camera || !frame.clientWidth) return;
    const zoom = camera.level;
    const seen = inSight(zoom);
    tiles.want(seen, [whole(), ...beside(seen)]);
    tint(zoom, seen);
    const context = sized(canvas, frame.clientWidth, frame.clientHeight);
    context.save();
    context.beginPath();
    context.rect(edge.left, edge.top, camera.width, camera.height);
    context.clip();
    context.fillStyle = inks().line;
    context.globalAlpha = 0.35;
    context.fillRect(camera.xOf(0), camera.yOf(0), layer.m * camera.pixels, layer.n * camera.pixels);
    context.globalAlpha = 1;
    for (const tile of seen) drawTile(context, tile);
    drawMarks(context);
    context.restore();
    if (near(camera)) fetchTokens();
    drawEdges(context, camera, tokens);
    drawScaleBar(context, camera);
    drawMini(mini, camera, picture(whole()));
    badge.hidden = !tiles.sampled(seen);
    pane.busy(!seen.some((tile) => tiles.get(tile)) && !tiles.get(whole()));
  }

  /** The tile, or part of a coarser one while it is loading. */
  function drawTile(context, tile) {
    const span = camera.cells(tile.zoom) * side;
    const [x, y, size] = [camera.xOf(tile.x * span), camera.yOf(tile.y * span), span * camera.pixels];
    for (let up = 0; up <= tile.zoom; up++) {
      const parent = { ...tile, zoom: tile.zoom - up, x: tile.x >> up, y: tile.y >> up };
      const image = picture(parent);
      if (!image) continue;
      const piece = side / 2 ** up;
      context.imageSmoothingEnabled = up > 0 || size < side;
      context.drawImage(image, (tile.x - (parent.x << up)) * piece, (tile.y - (parent.y << up)) * piece, piece, piece, x, y, size, size);
      return;
    }
  }

  /** Prefetches the same tiles of neighboring heads if that is cheap. */
  function beside(seen) {
    if (Math.max(layer.n, layer.m) > cheap) return [];
    return [head + 1, head - 1].filter((one) => headsIn(layer).includes(one)).flatMap((one) => seen.map((tile) => ({ ...tile, head: one })));
  }

  /** Frames around the open weight, the hovered one, and the one hovered in the other pane. */
  function drawMarks(context) {
    const own = pointer && camera.pixels >= clickable ? camera.under(pointer.x, pointer.y) : null;
    const opened = state.cell ? { row: state.cell[0], col: state.cell[1] } : null;
    context.strokeStyle = inks().accent;
    context.lineWidth = 2;
    const size = Math.max(6, camera.pixels);
    for (const cell of [own, opened, ghost]) {
      if (cell) context.strokeRect(camera.xOf(cell.col + 0.5) - size / 2, camera.yOf(cell.row + 0.5) - size / 2, size, size);
    }
  }

  async function fetchTokens() {
    const { rows, cols } = camera.sight;
    const covers = ([from, list], [a, b]) => from <= a && from + list.length >= b;
    if (covers(tokens.rows, rows) && covers(tokens.cols, cols)) return;
    const wider = ([a, b], length) => [Math.max(0, a - 64), Math.min(length, b + 64)];
    const [r, c] = [wider(rows, layer.n), wider(cols, layer.m)];
    const asked = layer;
    const [queries, keys] = await Promise.all([tokensOf(run, layer.queries, ...r), tokensOf(run, layer.keys, ...c)]).catch(() => [[], []]);
    if (asked !== layer || !queries.length) return;
    tokens = { rows: [r[0], queries], cols: [c[0], keys] };
    repaint();
  }

  // ── hover ────────────────────────────────────────────────────────────────────────────────────────────────────────────────

  function tell() {
    clearTimeout(resting);
    const cell = pointer ? camera.under(pointer.x, pointer.y) : null;
    note.hidden = !cell;
    point(cell ? { ...cell, from: pane.side } : null);
    if (!cell) return;
    const { row, col } = cell;
    const zoom = camera.level;
    const span = camera.cells(zoom);
    const tile = tiles.get({ ...whole(), zoom, x: Math.floor(col / (span * side)), y: Math.floor(row / (span * side)) });
    const pooled = tile?.values[(Math.floor(row / span) % side) * side + (Math.floor(col / span) % side)];
    const block = span > 1 && tile ? `${tile.sampled ? 'sampled ' : ''}${state.pool} of ${count(span)} × ${count(span)} weights here: ${weight(pooled)}` : undefined;
    const name = ([from, list], i) => (list[i - from] ? `${written(list[i - from])} (${count(i)})` : count(i));
    const exact = span === 1 && tile && !tile.sampled;
    write({ query: name(tokens.rows, row), key: name(tokens.cols, col), value: exact ? pooled : '…', note: block });
    if (!exact) resting = setTimeout(() => askWeight(cell, block, pointer), rest);
  }

  /** Fetches the exact weight if a pixel covers many. */
  async function askWeight({ row, col }, block, mine) {
    const asked = head;
    const [[query], [key], [value]] = await Promise.all([tokensOf(run, layer.queries, row, row + 1), tokensOf(run, layer.keys, col, col + 1),
      part(run, index, head, [row, row + 1], [col, col + 1])]).catch(() => [[], [], []]);
    if (pointer !== mine || asked !== head || value === undefined) return;
    write({ query: `${written(query)} (${count(row)})`, key: `${written(key)} (${count(col)})`, value, note: block });
  }

  function write(cell) {
    note.replaceChildren(tip(cell));
    const over = pointer.x + 18 + note.offsetWidth > canvas.clientWidth;
    note.style.left = `${over ? Math.max(0, pointer.x - 18 - note.offsetWidth) : pointer.x + 18}px`;
    note.style.top = `${Math.min(canvas.clientHeight - note.offsetHeight, Math.max(0, pointer.y + 12))}px`;
  }

  // ── the view ──────────────────────────────────────────────────────────────────────────────────────────────────────────────

  function resize() {
    const above = host.getBoundingClientRect().top + window.scrollY;
    frame.style.height = `${Math.min(860, Math.max(320, window.innerHeight - above - 72))}px`;
    camera.resize(frame.clientWidth, frame.clientHeight);
  }

  const resized = new ResizeObserver(() => { if (camera) { camera.resize(frame.clientWidth, frame.clientHeight); repaint(); } });
  resized.observe(frame);

  return {
    show(given) {
      state = given;
      const now = at(run, state);
      const other = layer !== now.layer;
      const shape = layer && layer.n === now.layer.n && layer.m === now.layer.m;
      [layer, index, head] = [now.layer, now.index, now.head];
      if (other) tokens = { rows: [0, []], cols: [0, []] };
      if (!shape) camera = new Camera(layer); else camera.layer = layer;
      resize();
      if (!shape || String(state.at) !== stands) camera.go(state.at);
      stands = String(state.at);
      canvas.setAttribute('aria-label', `Map of ${layerName(layer)}, ${headName(layer, head)}, ${count(layer.n)} by ${count(layer.m)}: arrows move, plus and minus zoom, Enter opens the weight in the middle`);
      repaint();
      tell();
    },
    mark(cell) {
      ghost = cell && cell.from !== pane.side && cell.row !== null && cell.col !== null ? cell : null;
      if (camera) repaint();
    },
    zoomBy: (factor) => zoomBy(factor),
    shown: () => camera.sight, // for an export of only this part
    picture() {
      const out = h('canvas', { width: canvas.width, height: canvas.height });
      const context = out.getContext('2d');
      context.fillStyle = inks().paper;
      context.fillRect(0, 0, out.width, out.height);
      context.drawImage(canvas, 0, 0);
      return out;
    },
    close() {
      tiles.close();
      resized.disconnect();
      stop();
      for (const timer of [saving, resting]) clearTimeout(timer);
      cancelAnimationFrame(waiting);
      camera = null;
    },
  };
}

export const map = { tab: 'heatmap', name: 'Map', hint: 'a long input, dragged and zoomed', suits: () => true, open };
