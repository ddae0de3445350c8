// The tiles of a map: loaded and pending. Four requests run at once, nearest first; tiles that scrolled away are
// cancelled. A sampled tile is shown and requested again in exact form.

import { Memory, source } from 'qkv/source';

export const side = 256; // cells per side of a tile
const atOnce = 4;
const slow = 2; // of those, requests for exact tiles, which may take seconds

/** The deepest zoom level of a matrix: one weight per cell. */
export const deepest = ({ n, m }) => Math.max(0, Math.ceil(Math.log2(Math.max(n, m) / side)));

const name = ({ layer, head, zoom, x, y, pool }) => `${layer}/${head}/${pool}/${zoom}/${x}/${y}`;

export class Tiles {
  /** `arrived` is called when a tile is loaded, `failed` with an error other than a cancellation. */
  constructor(run, arrived, failed) {
    Object.assign(this, { run, arrived, failed, here: new Memory(192), way: new Map(), wanted: [], rough: [], refused: new Set() });
  }

  /** The tile, if loaded: { values: f32 [256, 256], sampled, most }. */
  get(tile) {
    return this.here.get(name(tile));
  }

  /** Sets the wanted tiles, most urgent first; for those in `rough` a sample will do. Other pending requests are cancelled. */
  want(tiles, rough = []) {
    Object.assign(this, { wanted: tiles, rough });
    const names = new Set([...tiles, ...rough].map(name));
    for (const [key, { controller }] of this.way) if (!names.has(key)) controller.abort();
    this.next();
  }

  next() {
    for (const exact of [false, true]) {
      for (const tile of exact ? this.wanted : [...this.wanted, ...this.rough]) {
        if (this.way.size >= atOnce || (exact && [...this.way.values()].filter((one) => one.exact).length >= slow)) return;
        const key = name(tile);
        const known = this.here.get(key);
        const needed = exact ? known?.sampled : !known;
        if (needed && !this.way.has(key) && !this.refused.has(`${key}/${exact}`)) this.fetch(tile, key, exact);
      }
    }
  }

  async fetch(tile, key, exact) {
    const controller = new AbortController();
    this.way.set(key, { controller, exact });
    try {
      const { values, sampled } = await source.tile(this.run, { ...tile, exact }, controller.signal);
      let most = 0;
      for (let i = 0; i < values.length; i++) if (values[i] > most) most = values[i];
      this.here.set(key, { values, sampled: sampled && !exact, most });
      this.arrived(tile);
    } catch (error) {
      if (error.name !== 'AbortError') {
        this.refused.add(`${key}/${exact}`); // not requested again, so that a server that refuses is not hammered
        this.failed(error);
      }
    } finally {
      if (this.way.get(key)?.controller === controller) this.way.delete(key);
      this.next();
    }
  }

  /** Whether any wanted tile is only a sample. */
  sampled(tiles) {
    return tiles.some((tile) => this.here.get(name(tile))?.sampled);
  }

  close() {
    this.want([]);
  }
}
