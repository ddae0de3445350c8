// The view of one head as lines between tokens: queries on one side, keys on the other, horizontally or vertically.
// Tokens are buttons that the keyboard reaches; lines are drawn on one canvas. Long inputs show the tokens around the
// position of the map.

import { h, rove, sized } from 'qkv/element';
import { point } from 'qkv/hover';
import { folded, holding, matrix, unitOf } from 'qkv/matrix';
import { weight } from 'qkv/number';
import { at, fits, stepwise, wide } from 'qkv/run';
import { say } from 'qkv/say';
import { largest, scale } from 'qkv/scale';
import { pick } from 'qkv/selection';
import { heldWeights, part, tokensOf, weightsOf } from 'qkv/source';
import { inks } from 'qkv/theme';
import { prefetch } from 'qkv/heatmap';

const faint = 0.012; // lines below this share of the scale are not drawn
const plenty = 0.05; // if no weight reaches this, none is drawn as if it were strong
const around = 40; // tokens shown each way of a long input

/** The shown tokens of a long side: around `middle`. */
function span(middle, count) {
  const from = Math.max(0, Math.min(Math.round(middle) - around, count - 2 * around));
  return [from, Math.min(count, from + 2 * around)];
}

/** Keyboard activation of a button toggles the selection; a click is passed on. */
const byHand = (event) => (event.detail === 0 ? { ctrlKey: true } : event);

function open(host, pane) {
  const { run } = pane;
  const canvas = h('canvas', { class: 'strings', 'aria-hidden': 'true' });
  const sides = { rows: h('div', { class: 'tokens', role: 'group' }), cols: h('div', { class: 'tokens', role: 'group' }) };
  const note = h('p', { class: 'quiet note' });
  const frame = h('div', { class: 'lines' }, canvas, sides.rows, sides.cols);
  host.append(frame, note);
  let [drawn, look, shown, offset] = [null, null, null, [0, 0]];
  let [marked, state] = [null, null];

  for (const side of ['rows', 'cols']) {
    const index = (event) => [...sides[side].children].indexOf(event.target.closest('button'));
    const token = (i) => drawn[side][i].members[0] + offset[side === 'rows' ? 0 : 1];
    const aim = (i) => (i < 0 ? point(null) : point({ row: side === 'rows' ? token(i) : null, col: side === 'cols' ? token(i) : null, from: pane.side }));
    sides[side].addEventListener('pointerover', (event) => aim(index(event)));
    sides[side].addEventListener('pointerleave', () => point(null));
    sides[side].addEventListener('focusin', (event) => { aim(index(event)); say(summary(side, index(event))); });
    sides[side].addEventListener('focusout', () => point(null));
    sides[side].addEventListener('click', (event) => { if (index(event) >= 0) pick(side, index(event), absolute(side), byHand(event)); });
    sides[side].addEventListener('keydown', (event) => rove(event, [...sides[side].children]));
  }

  const absolute = (side) => drawn[side].map((unit) => ({ members: unit.members.map((member) => member + offset[side === 'rows' ? 0 : 1]) }));

  function summary(side, i) { // the strongest weights from or to a token
    if (i < 0) return '';
    const m = drawn.cols.length;
    const [mine, others] = side === 'rows' ? [(j) => drawn.values[i * m + j], drawn.cols] : [(j) => drawn.values[j * m + i], drawn.rows];
    const best = others.map((_, j) => j).sort((a, b) => mine(b) - mine(a)).slice(0, 3);
    return `${drawn[side][i].label} ${side === 'rows' ? 'attends to' : 'is attended by'} ${best.map((j) => `${others[j].label} ${weight(mine(j))}`).join(', ')}`;
  }

  function layOut() {
    const down = look.layout === 'down';
    frame.className = `lines ${down ? 'down' : 'across'}`;
    for (const side of ['rows', 'cols']) {
      const focused = [...sides[side].children].indexOf(document.activeElement);
      sides[side].setAttribute('aria-label', side === 'rows' ? 'Query tokens' : 'Key tokens');
      sides[side].replaceChildren(...drawn[side].map((unit, i) => h('button', {
        type: 'button', tabIndex: i === Math.max(0, focused) ? 0 : -1, 'aria-pressed': String(look[side].includes(i)),
        class: `${unit.special ? 'special ' : ''}${side === 'rows' && look.step !== null && i > look.step ? 'later' : ''}${side === 'rows' && look.step === i ? 'now' : ''}`,
      }, unit.label)));
      if (focused >= 0) sides[side].children[focused]?.focus();
    }
  }

  /** The start of the lines of a token: the edge of its button that faces the other side. */
  function anchors(side) {
    const box = frame.getBoundingClientRect();
    return [...sides[side].children].map((button) => {
      const rect = button.getBoundingClientRect();
      const first = side === 'rows';
      return look.layout === 'down'
        ? [(first ? rect.right : rect.left) - box.left, (rect.top + rect.bottom) / 2 - box.top]
        : [(rect.left + rect.right) / 2 - box.left, (first ? rect.bottom : rect.top) - box.top];
    });
  }

  function paintLines() {
    if (!drawn) return;
    const context = sized(canvas, frame.scrollWidth, frame.scrollHeight);
    const [from, to] = [anchors('rows'), anchors('cols')];
    const m = drawn.cols.length;
    const only = focus();
    const lines = [];
    for (let i = 0; i < drawn.values.length; i++) {
      const t = drawn.kept && !drawn.kept[i] ? 0 : look.scale.at(drawn.values[i]);
      if (t > faint) lines.push([t, Math.floor(i / m), i % m]);
    }
    lines.sort((a, b) => a[0] - b[0]);
    const ink = inks();
    context.strokeStyle = ink.accent;
    context.lineCap = 'round';
    for (const [t, r, c] of lines) {
      const dim = (only && !only(r, c)) || (look.step !== null && r > look.step);
      if (dim && lines.length > 4000) continue;
      context.globalAlpha = dim ? 0.05 : only || (look.step !== null && r === look.step) ? 0.15 + 0.85 * t : (look.step !== null ? 0.25 : 1) * (0.06 + 0.8 * t);
      context.lineWidth = 0.75 + 4.5 * t;
      const [[x0, y0], [x1, y1]] = [from[r], to[c]];
      context.beginPath();
      context.moveTo(x0, y0);
      if (look.layout === 'down') context.bezierCurveTo((x0 + x1) / 2, y0, (x0 + x1) / 2, y1, x1, y1);
      else context.bezierCurveTo(x0, (y0 + y1) / 2, x1, (y0 + y1) / 2, x1, y1);
      context.stroke();
    }
    shade(only);
  }

  /** The highlighted lines: of the hovered token, else of the selection; null for all. */
  function focus() {
    const row = marked?.row === null || marked?.row === undefined ? -1 : unitOf(drawn.rows, marked.row - offset[0]);
    const col = marked?.col === null || marked?.col === undefined ? -1 : unitOf(drawn.cols, marked.col - offset[1]);
    if (row >= 0 && col >= 0) return (r, c) => r === row && c === col;
    if (row >= 0) return (r) => r === row;
    if (col >= 0) return (_, c) => c === col;
    if (look.rows.length || look.cols.length) return (r, c) => (!look.rows.length || look.rows.includes(r)) && (!look.cols.length || look.cols.includes(c));
    return null;
  }

  /** Shades each token by its weight to or from the highlighted tokens. */
  function shade(only) {
    const m = drawn.cols.length;
    const share = { rows: new Float64Array(drawn.rows.length), cols: new Float64Array(m) };
    if (only) {
      const pointedRow = marked?.row !== null && marked?.row !== undefined;
      const lines = pointedRow ? [unitOf(drawn.rows, marked.row - offset[0])] : look.rows;
      const pointedCol = marked?.col !== null && marked?.col !== undefined;
      const across = pointedCol ? [unitOf(drawn.cols, marked.col - offset[1])] : look.cols;
      if (lines.length && !(pointedCol && !pointedRow)) share.cols = folded(drawn, lines.filter((i) => i >= 0), state.fold, false);
      if (across.length && !(pointedRow && !pointedCol)) share.rows = folded(drawn, across.filter((i) => i >= 0), state.fold, true);
    }
    for (const side of ['rows', 'cols']) {
      [...sides[side].children].forEach((button, i) => {
        const value = share[side][i];
        button.style.setProperty('--share', `${Math.round(55 * Math.min(1, value))}%`);
        button.title = only && value > 0 ? weight(value) : '';
      });
    }
  }

  async function fetch(now) { // the weights and tokens that are shown
    const { index, layer, head } = now;
    if (fits(layer)) {
      offset = [0, 0];
      note.textContent = '';
      const tokens = [run.sides[layer.queries].tokens, run.sides[layer.keys].tokens];
      return [heldWeights(run, index, head) ?? (pane.busy(true), await weightsOf(run, index, head)), [layer.n, layer.m], tokens];
    }
    const [row, col] = state.at ?? [layer.n / 2, layer.m / 2];
    const [rows, cols] = [span(row, layer.n), span(col, layer.m)];
    pane.busy(true);
    const [weights, queries, keys] = await Promise.all([part(run, index, head, rows, cols), tokensOf(run, layer.queries, ...rows), tokensOf(run, layer.keys, ...cols)]);
    offset = [rows[0], cols[0]];
    note.textContent = `Queries ${rows[0]}–${rows[1] - 1}, keys ${cols[0]}–${cols[1] - 1}: the part that the map shows. Move the map to see others.`;
    return [weights, [rows[1] - rows[0], cols[1] - cols[0]], [queries, keys]];
  }

  const resized = new ResizeObserver(() => paintLines());
  resized.observe(frame);

  return {
    async show(chosen) {
      state = chosen;
      const now = at(run, state);
      const request = shown = {};
      const [weights, shape, tokens] = await fetch(now);
      if (request !== shown) return;
      pane.busy(false);
      drawn = matrix(weights, shape, tokens, offset[1] > 0 ? { ...state, sink: true } : state);
      const step = stepwise(run, now.layer) && state.step !== null ? unitOf(drawn.rows, state.step) : -1;
      const layout = state.layout === 'auto' ? (tokens.some(wide) ? 'across' : 'down') : state.layout;
      const values = drawn.kept ? drawn.values.filter((_, i) => drawn.kept[i]) : drawn.values;
      const relative = (side, from) => holding(drawn[side], state[side].map((token) => token - from));
      look = { layout, step: step < 0 ? null : step, scale: scale(state.scale, values, { most: Math.max(plenty, largest(values)) }), rows: relative('rows', offset[0]), cols: relative('cols', offset[1]) };
      layOut();
      paintLines();
      pane.legend(null);
      if (fits(now.layer)) prefetch(run, now.index, now.head);
    },
    mark(cell) {
      marked = cell;
      paintLines();
    },
    picture() { // the lines, with the tokens written where their buttons are
      const out = h('canvas');
      const ratio = canvas.width / parseFloat(canvas.style.width);
      [out.width, out.height] = [canvas.width, canvas.height];
      const context = out.getContext('2d');
      const ink = inks();
      context.fillStyle = ink.paper;
      context.fillRect(0, 0, out.width, out.height);
      context.drawImage(canvas, 0, 0);
      context.scale(ratio, ratio);
      context.font = `14px ${ink.font}`;
      context.textAlign = 'center';
      context.textBaseline = 'middle';
      context.fillStyle = ink.text;
      const box = frame.getBoundingClientRect();
      for (const button of frame.querySelectorAll('button')) {
        const rect = button.getBoundingClientRect();
        context.fillText(button.textContent, (rect.left + rect.right) / 2 - box.left, (rect.top + rect.bottom) / 2 - box.top);
      }
      return out;
    },
    numbers: () => drawn,
    close() {
      shown = null;
      resized.disconnect();
    },
  };
}

export const lines = { tab: 'lines', name: 'Lines', hint: 'which token attends to which', suits: () => true, open };
