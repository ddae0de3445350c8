// The overview of all heads: one thumbnail each, rows are layers, columns heads, one block per group. The thumbnails of
// a block share a canvas; a transparent button lies over each, so that keyboards and screen readers reach every head.

import { fill, h, rove, sized } from 'qkv/element';
import { palette } from 'qkv/palette';
import { at, fits, groupName, headName, headsIn, layerName } from 'qkv/run';
import { evenly, pixelsOf, scale, stamp, tint } from 'qkv/scale';
import { gridOf } from 'qkv/source';
import { choose } from 'qkv/state';
import { theme } from 'qkv/theme';

const sizes = [24, 48, 96]; // of a fetched thumbnail, in pixels
const gap = 4;
const margin = 22; // for the layer's number

export class Grid {
  /** `largest`: CSS pixels of a thumbnail; `goesTo`: state that a click sets besides the head; `beside`: blocks side by side if there is room. */
  constructor(host, run, { largest, goesTo, beside = false }) {
    Object.assign(this, { host, run, largest, goesTo, beside, blocks: [] });
    this.badge = h('p', { class: 'quiet note', hidden: true }, 'sampled: thumbnails of a long input are computed from some of its rows');
    this.build();
  }

  build() {
    const { run } = this;
    this.blocks = run.groups.filter((group) => group.layers.length).map((group) => {
      const across = Math.max(...group.layers.map((layer) => headsIn(run.layers[layer]).length));
      const canvas = h('canvas', { 'aria-hidden': 'true' });
      const buttons = group.layers.flatMap((index) => headsIn(run.layers[index]).map((head) => {
        const layer = run.layers[index];
        const name = `${layerName(layer)}, ${headName(layer, head)}`;
        const button = h('button', { type: 'button', class: 'thumb', tabIndex: -1, 'aria-label': name, title: name, onclick: () => this.go(index, head) });
        Object.assign(button, { index, head });
        return button;
      }));
      const body = h('div', { class: 'thumbs', onkeydown: (event) => rove(event, buttons, across) }, canvas, buttons);
      const title = run.groups.length > 1 ? h('h3', {}, groupName(group.name)) : null;
      return { group, across, canvas, buttons, body, section: h('section', { class: 'block' }, title, body) };
    });
    fill(this.host, this.blocks.map(({ section }) => section), this.badge);
  }

  go(layer, head) {
    choose({ layer, head, cell: null, ...(this.goesTo?.() ?? {}) }, { push: true });
  }

  /** Lays out the blocks, marks the chosen head and paints loaded thumbnails. */
  async show(state) {
    const { run } = this;
    const room = this.host.clientWidth;
    if (!room) return;
    const now = at(run, state);
    const abreast = this.beside ? this.blocks.reduce((sum, { across }) => sum + across, 0) : 0;
    const narrow = Math.floor((room - (margin + 28) * this.blocks.length) / abreast) - gap; // of a thumbnail with all blocks side by side
    for (const { group, across, canvas, buttons, body } of this.blocks) {
      const size = Math.max(10, Math.min(this.largest, narrow >= 40 ? narrow : Infinity, Math.floor((room - margin) / across) - gap));
      const step = size + gap;
      this.size = size;
      const [width, height] = [margin + across * step, group.layers.length * step];
      body.style.width = `${width}px`;
      body.style.height = `${height}px`;
      buttons.forEach((button) => {
        const [r, c] = [group.layers.indexOf(button.index), headsIn(run.layers[button.index]).indexOf(button.head)];
        Object.assign(button.style, { left: `${margin + c * step}px`, top: `${r * step}px`, width: `${size}px`, height: `${size}px` });
        const mine = button.index === now.index && button.head === now.head;
        button.classList.toggle('chosen', mine);
        button.tabIndex = mine ? 0 : -1;
        if (mine) button.setAttribute('aria-current', 'true'); else button.removeAttribute('aria-current');
      });
      if (!buttons.some((button) => button.tabIndex === 0)) buttons[0].tabIndex = 0;
      const look = `${width}/${height}/${state.scale}/${state.palette}/${theme()}/${state.pool}/${devicePixelRatio}`;
      if (canvas.dataset.look !== look && this.values) this.paint(canvas, group, across, size, state, look);
    }
    const pixels = sizes.find((each) => each >= this.size * 0.9) ?? sizes.at(-1);
    if (this.pool !== state.pool || this.pixels !== pixels) await this.fetch(state, pixels);
  }

  async fetch(state, pixels) {
    Object.assign(this, { pool: state.pool, pixels });
    const { values, sampled } = await gridOf(this.run, pixels, state.pool);
    if (this.pool !== state.pool || this.pixels !== pixels) return;
    Object.assign(this, { values, arrived: pixels });
    this.badge.hidden = !sampled;
    for (const { canvas } of this.blocks) canvas.dataset.look = '';
    await this.show(state);
  }

  /** The thumbnail of a head, [pixels, pixels]. */
  thumbnail(index, head) {
    const area = this.arrived ** 2;
    const before = this.run.layers.slice(0, index).reduce((sum, layer) => sum + layer.heads, 0);
    const one = (which) => this.values.subarray((before + which) * area, (before + which + 1) * area);
    if (head !== 'mean') return one(head);
    const { heads } = this.run.layers[index];
    const mean = new Float32Array(area);
    for (let which = 0; which < heads; which++) one(which).forEach((value, i) => { mean[i] += value / heads; });
    return mean;
  }

  paint(canvas, group, across, size, state, look) {
    const { run, arrived: pixels } = this;
    const step = size + gap;
    canvas.dataset.look = look;
    const context = sized(canvas, margin + across * step, group.layers.length * step);
    const shades = pixelsOf(palette(state.palette, theme()));
    const small = h('canvas');
    const style = getComputedStyle(this.host);
    context.font = `11px ${style.fontFamily}`;
    context.textAlign = 'right';
    context.textBaseline = 'middle';
    context.fillStyle = style.color;
    group.layers.forEach((index, r) => {
      const layer = run.layers[index];
      context.fillText(String(layer.index), margin - 8, r * step + size / 2);
      headsIn(layer).forEach((head, c) => {
        const values = this.thumbnail(index, head);
        const [cols, rows] = [Math.min(pixels, layer.m), Math.min(pixels, layer.n)];
        const image = stamp(tint(thinned(values, pixels, rows, cols), cols, rows, scale(state.scale, values, { floor: fits(layer) ? undefined : evenly(layer.m) }), shades), small);
        context.imageSmoothingEnabled = layer.n > pixels || layer.m > pixels;
        context.imageSmoothingQuality = 'high';
        context.drawImage(image, margin + c * step, r * step, size, size);
      });
    });
  }
}

/** Undoes the upscaling of a small matrix to a thumbnail, so that its cells are drawn equally large. */
function thinned(values, pixels, rows, cols) {
  if (rows === pixels && cols === pixels) return values;
  const out = new Float32Array(rows * cols);
  const middle = (i, of) => Math.floor(((i + 0.5) * pixels) / of);
  for (let r = 0; r < rows; r++) for (let c = 0; c < cols; c++) out[r * cols + c] = values[middle(r, rows) * pixels + middle(c, cols)];
  return out;
}

function open(host, pane) {
  const grid = new Grid(h('div', { class: 'all' }), pane.run, { largest: 112, beside: true, goesTo: () => ({ view: 'heatmap' }) });
  host.append(grid.host);
  return {
    async show(state) {
      pane.legend(null);
      await grid.show(state);
      pane.busy(false);
    },
    picture: () => {
      const canvases = grid.blocks.map(({ canvas }) => canvas);
      const out = h('canvas', { width: Math.max(...canvases.map(({ width }) => width)), height: canvases.reduce((sum, { height }) => sum + height + 24, 0) });
      const context = out.getContext('2d');
      context.fillStyle = getComputedStyle(document.body).backgroundColor;
      context.fillRect(0, 0, out.width, out.height);
      let y = 12;
      for (const canvas of canvases) {
        context.drawImage(canvas, 0, y);
        y += canvas.height + 24;
      }
      return out;
    },
    close() {},
  };
}

export const grid = { tab: 'grid', name: 'All heads', hint: 'a thumbnail of every head', suits: () => true, open };
