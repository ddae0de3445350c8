// A matrix drawn as cells with labeled rows and columns on one canvas; hover marks are drawn on a second canvas above
// it. Knows rows and columns by index only; its owner gives them meaning and handles clicks.

import { h, sized } from 'qkv/element';
import { cut, every, level, longest } from 'qkv/label';
import { css } from 'qkv/palette';
import { paint, stamp } from 'qkv/scale';
import { inks } from 'qkv/theme';

const type = 13; // px
const tiny = 11; // px, if cells are slightly too small for `type`
const widest = 58; // maximum size of a cell
const bars = 44; // room for the bars of selected rows and columns

export class Chart {
  /** `on` has point(row, col, from), open(row, col), pick('rows' | 'cols', index, event), tip(row, col) → element. */
  constructor(host, on, label) {
    this.on = on;
    this.base = h('canvas', { class: 'cells' });
    this.over = h('canvas', { class: 'over', tabIndex: 0, role: 'application', 'aria-roledescription': 'heatmap', 'aria-label': label });
    this.tip = h('div', { class: 'tip', hidden: true });
    this.frame = h('div', { class: 'chart' }, this.base, this.over, this.tip);
    this.cursor = null;
    host.append(this.frame);
    this.over.addEventListener('pointermove', (event) => this.move(event));
    this.over.addEventListener('pointerleave', () => on.point(null, null));
    this.over.addEventListener('pointerdown', (event) => { if (event.pointerType === 'mouse') event.preventDefault(); });
    this.over.addEventListener('click', (event) => this.click(event));
    this.over.addEventListener('keydown', (event) => this.key(event));
    this.over.addEventListener('blur', () => { this.cursor = null; on.point(null, null); });
  }

  /** Draws a matrix. `look`: { table, palette, scale, rows, cols: selected ones, rowBars, colBars, step, room: CSS pixels }. */
  draw(matrix, look) {
    Object.assign(this, { matrix, look });
    const { rows, cols } = matrix;
    const context = this.base.getContext('2d');
    context.font = `${type}px ${inks().font}`;
    const names = { rows: rows.map(({ label }) => cut(context, label)), cols: cols.map(({ label }) => cut(context, label)) };
    const widestOf = (labels) => Math.max(14, ...labels.map((label) => context.measureText(label).width));
    const left = Math.ceil(widestOf(names.rows)) + 14;
    const right = look.colBars ? bars + 8 : 2;
    const above = this.frame.getBoundingClientRect().top + window.scrollY; // height of what is above the picture
    const tall = Math.max(15, Math.max(300, window.innerHeight - above - 90) / Math.max(1, rows.length));
    const fit = (spare) => Math.min(widest, tall, (look.room - left - right - spare) / Math.max(1, cols.length));
    const flat = level(context, names.cols, fit(0));
    const slant = flat ? 0 : Math.ceil(widestOf(names.cols) * Math.SQRT1_2);
    let cell = fit(slant);
    if (cell > 3) cell = Math.floor(cell);
    const top = flat ? 26 : slant + 16;
    const letters = cell >= type + 2 || cell < tiny + 1 ? type : tiny;
    context.font = `${letters}px ${inks().font}`;
    const fitting = names.cols.filter((label) => context.measureText(label).width <= cell + 1).length;
    const upright = fitting >= 0.8 * names.cols.length; // then only labels that do not fit are slanted
    const [width, height] = [left + cell * cols.length + right + slant, top + cell * rows.length + (look.rowBars ? bars + 10 : 4)];
    const size = { left, top, cell, flat, upright, names, type: letters, width, height };
    this.size = size;
    this.paintBase(sized(this.base, size.width, size.height));
    this.paintOver();
    this.frame.style.width = `${size.width}px`;
    this.frame.style.height = `${size.height}px`;
  }

  paintBase(context) {
    const { matrix, look, size: { left, top, cell } } = this;
    const { rows, cols, values, kept } = matrix;
    const ink = inks();
    context.save();
    if (cell >= 9 && values.length <= 12000) {
      const gap = cell >= 14 ? 1.5 : 1;
      for (let r = 0; r < rows.length; r++) {
        context.globalAlpha = look.step !== null && r > look.step ? 0.18 : 1;
        for (let c = 0; c < cols.length; c++) {
          const i = r * cols.length + c;
          const t = kept && !kept[i] ? 0 : look.scale.at(values[i]);
          const color = look.palette(t);
          context.fillStyle = css(color);
          context.beginPath();
          context.roundRect(left + c * cell, top + r * cell, cell - gap, cell - gap, cell >= 20 ? 3 : 1);
          context.fill();
          if (cell >= 38 && values[i] >= 0.005 && !(kept && !kept[i])) this.writeNumber(context, values[i], color, left + (c + 0.5) * cell - gap / 2, top + (r + 0.5) * cell);
        }
      }
    } else if (values.length) {
      context.imageSmoothingEnabled = cell < 1;
      context.drawImage(stamp(paint(values, cols.length, rows.length, look.table, kept)), left, top, cell * cols.length, cell * rows.length);
    }
    context.restore();
    this.writeLabels(context, ink);
    this.drawBars(context, ink);
  }

  writeNumber(context, value, [red, green, blue], x, y) {
    context.fillStyle = 0.299 * red + 0.587 * green + 0.114 * blue > 140 ? 'rgb(0 0 0 / 62%)' : 'rgb(255 255 255 / 82%)';
    context.font = `11px ${inks().font}`;
    context.textAlign = 'center';
    context.textBaseline = 'middle';
    context.fillText(value.toFixed(2).replace(/^0/, ''), x, y);
  }

  writeLabels(context, ink) {
    const { matrix: { rows, cols }, look, size: { left, top, cell, names } } = this;
    context.font = `${this.size.type}px ${ink.font}`;
    context.textBaseline = 'middle';
    const step = every(cell, this.size.type === tiny ? tiny + 1 : type + 2);
    rows.forEach((row, r) => {
      if (r % step) return;
      const mine = look.rows.includes(r);
      context.fillStyle = mine ? ink.accent : row.special ? ink.quiet : ink.text;
      context.globalAlpha = look.step !== null && r > look.step ? 0.35 : 1;
      context.textAlign = 'right';
      context.fillText(names.rows[r], left - 9, top + (r + 0.5) * cell);
    });
    context.globalAlpha = 1;
    cols.forEach((col, c) => {
      if (c % step) return;
      context.fillStyle = look.cols.includes(c) ? ink.accent : col.special ? ink.quiet : ink.text;
      this.columnLabel(context, names.cols[c], c);
    });
    if (look.step !== null && look.step < rows.length) {
      context.strokeStyle = ink.accent;
      context.lineWidth = 2;
      context.strokeRect(left - 2, top + look.step * cell - 2, cell * cols.length + 2.5, cell + 2.5);
    }
  }

  /** Whether a column label is horizontal. */
  stands(context, label) {
    const { flat, upright, cell } = this.size;
    return flat || (upright && context.measureText(label).width <= cell + 1);
  }

  columnLabel(context, label, c) {
    const { left, top, cell } = this.size;
    const upright = this.stands(context, label);
    context.save();
    context.translate(left + (c + 0.5) * cell, top - (upright ? 13 : 8));
    context.textAlign = upright ? 'center' : 'left';
    if (!upright) context.rotate(-Math.PI / 4);
    context.fillText(label, 0, 0);
    context.restore();
  }

  drawBars(context, ink) {
    const { matrix: { rows, cols }, look, size: { left, top, cell } } = this;
    const inner = Math.max(0.5, cell - (cell > 4 ? 1.5 : 0));
    context.fillStyle = ink.accent;
    if (look.rowBars) {
      const most = Math.max(...look.rowBars, 1e-9);
      look.rowBars.forEach((value, c) => context.fillRect(left + c * cell, top + rows.length * cell + 6, inner, Math.max(1, (value / most) * bars)));
    }
    if (look.colBars) {
      const most = Math.max(...look.colBars, 1e-9);
      look.colBars.forEach((value, r) => context.fillRect(left + cols.length * cell + 6, top + r * cell, Math.max(1, (value / most) * bars), inner));
    }
  }

  /** Marks the hovered cell, row or column; null clears. `mine`: the tooltip belongs to this chart. */
  mark(row, col, mine = true) {
    this.marked = { row, col, mine };
    if (this.size) this.paintOver();
  }

  paintOver() {
    const { left, top, cell, width, height, names } = this.size;
    const context = sized(this.over, width, height);
    const { row = null, col = null, mine = false } = this.marked ?? {};
    const ink = inks();
    const { rows, cols } = this.matrix;
    const on = row !== null && row >= 0 && row < rows.length;
    const off = col !== null && col >= 0 && col < cols.length;
    context.font = `600 ${this.size.type}px ${ink.font}`;
    context.textBaseline = 'middle';
    context.strokeStyle = ink.accent;
    const high = type + 6;
    if (on) {
      const wide = context.measureText(names.rows[row]).width;
      context.fillStyle = ink.paper;
      context.fillRect(0, top + (row + 0.5) * cell - high / 2, left - 2, high);
      context.fillStyle = ink.accent;
      context.textAlign = 'right';
      context.fillText(names.rows[row], Math.max(left - 9, wide), top + (row + 0.5) * cell);
      context.lineWidth = 1;
      context.strokeRect(left - 1, top + row * cell - 1, cell * cols.length + 0.5, cell + 0.5);
    }
    if (off) {
      context.fillStyle = ink.paper;
      context.save();
      const upright = this.stands(context, names.cols[col]);
      context.translate(left + (col + 0.5) * cell, top - (upright ? 13 : 8));
      if (!upright) context.rotate(-Math.PI / 4);
      context.fillRect(upright ? -cell / 2 : -2, -high / 2, upright ? cell : longest, high);
      context.restore();
      context.fillStyle = ink.accent;
      this.columnLabel(context, names.cols[col], col);
      context.lineWidth = 1;
      context.strokeRect(left + col * cell - 1, top - 1, cell + 0.5, cell * rows.length + 0.5);
    }
    if (on && off) {
      context.lineWidth = 2;
      context.strokeRect(left + col * cell - 1.5, top + row * cell - 1.5, cell + 1.5, cell + 1.5);
    }
    this.tip.hidden = !(on && off && mine);
    if (on && off && mine) {
      this.tip.replaceChildren(this.on.tip(row, col));
      this.placeTip(left + col * cell, top + row * cell);
    }
  }

  /** Places the tooltip right of the cell at x, y, else left, else below, never over it. */
  placeTip(x, y) {
    const { cell } = this.size;
    const { offsetWidth: width, offsetHeight: height } = this.tip;
    const from = this.frame.getBoundingClientRect().left;
    const right = from + x + cell + 10 + width < document.documentElement.clientWidth - 8;
    const left = from + x - 10 - width > 8;
    const across = right ? x + cell + 10 : left ? x - 10 - width : Math.max(8 - from, Math.min(x, document.documentElement.clientWidth - 8 - width - from));
    this.tip.style.left = `${across}px`;
    this.tip.style.top = `${right || left ? y + cell / 2 - height / 2 : y + cell + 10}px`;
  }

  /** The cell under the pointer; −1 for labels. */
  under(event) {
    const box = this.over.getBoundingClientRect();
    const { left, top, cell } = this.size;
    const { rows, cols } = this.matrix;
    const [col, row] = [Math.floor((event.clientX - box.left - left) / cell), Math.floor((event.clientY - box.top - top) / cell)];
    return { row: row < rows.length ? Math.max(-1, row) : null, col: col < cols.length ? Math.max(-1, col) : null };
  }

  move(event) {
    if (!this.matrix) return;
    const { row, col } = this.under(event);
    this.cursor = null;
    this.on.point(row === null || row < 0 || col === null ? null : row, col === null || col < 0 || row === null ? null : col);
    this.over.style.cursor = row === null || col === null ? 'default' : 'pointer';
  }

  click(event) {
    if (!this.matrix) return;
    const { row, col } = this.under(event);
    if (row === null || col === null || (row < 0 && col < 0)) return;
    if (col < 0) this.on.pick('rows', row, event);
    else if (row < 0) this.on.pick('cols', col, event);
    else this.on.open(row, col);
  }

  key(event) {
    const { rows, cols } = this.matrix ?? { rows: [], cols: [] };
    if (!rows.length || !cols.length || event.shiftKey || event.ctrlKey || event.metaKey || event.altKey) return;
    const [row, col] = this.cursor ?? [0, 0];
    const to = { ArrowUp: [row - 1, col], ArrowDown: [row + 1, col], ArrowLeft: [row, col - 1], ArrowRight: [row, col + 1], Home: [row, 0], End: [row, cols.length - 1] }[event.key];
    if (to) {
      this.cursor = this.cursor ? [Math.min(rows.length - 1, Math.max(0, to[0])), Math.min(cols.length - 1, Math.max(0, to[1]))] : [row, col];
      this.on.point(...this.cursor, true);
    } else if (event.key === 'Enter' && this.cursor) this.on.open(row, col);
    else if (event.key === ' ' && this.cursor) this.on.pick('rows', row, { ctrlKey: true });
    else if (event.key === 'k' && this.cursor) this.on.pick('cols', col, { ctrlKey: true });
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  /** The picture as one canvas with the background of the page. */
  picture() {
    const canvas = h('canvas');
    [canvas.width, canvas.height] = [this.base.width, this.base.height];
    const context = canvas.getContext('2d');
    context.fillStyle = inks().paper;
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.drawImage(this.base, 0, 0);
    return canvas;
  }
}
