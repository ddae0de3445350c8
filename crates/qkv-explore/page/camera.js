// The viewport of a map: the matrix position (row, column) at the center of the canvas and the pixels per weight.
// Converts between matrix and pixel coordinates and lists the visible tiles.

import { deepest, side } from 'qkv/tiles';

/** Space for labels at the left and top edge, in CSS pixels. */
export const edge = { left: 62, top: 44 };

const closest = 44; // the most pixels per weight
const bound = (value, low, high) => Math.min(high, Math.max(low, value));

export class Camera {
  constructor(layer) {
    Object.assign(this, { layer, width: 0, height: 0, row: layer.n / 2, col: layer.m / 2, pixels: 0 });
  }

  /** Sets the canvas size; a camera without a position shows the whole matrix. */
  resize(width, height) {
    Object.assign(this, { width: Math.max(1, width - edge.left), height: Math.max(1, height - edge.top) });
    this.keep();
  }

  /** Pixels per weight when the whole matrix is visible. */
  get least() {
    return Math.min(this.width / this.layer.m, this.height / this.layer.n);
  }

  get whole() {
    return this.pixels <= this.least * 1.05;
  }

  keep() {
    this.pixels = bound(this.pixels, this.least * 0.96, Math.max(closest, this.least));
    this.row = bound(this.row, 0, this.layer.n);
    this.col = bound(this.col, 0, this.layer.m);
  }

  /** Moves to [row, column, pixels]; null shows the whole matrix. */
  go(place) {
    const { n, m } = this.layer;
    [this.row, this.col, this.pixels] = place?.length === 3 ? place : [n / 2, m / 2, 0];
    this.keep();
  }

  /** The position, short enough for a URL. */
  get place() {
    return [this.row, this.col, this.pixels].map((value) => Number(value.toPrecision(6)));
  }

  pan(x, y) {
    this.col += x / this.pixels;
    this.row += y / this.pixels;
    this.keep();
  }

  /** Zooms around x, y. */
  zoom(factor, x = edge.left + this.width / 2, y = edge.top + this.height / 2) {
    const [row, col] = [this.rowAt(y), this.colAt(x)];
    this.pixels *= factor;
    this.keep();
    this.row += row - this.rowAt(y);
    this.col += col - this.colAt(x);
    this.keep();
  }

  xOf(col) { return edge.left + this.width / 2 + (col - this.col) * this.pixels; }
  yOf(row) { return edge.top + this.height / 2 + (row - this.row) * this.pixels; }
  colAt(x) { return this.col + (x - edge.left - this.width / 2) / this.pixels; }
  rowAt(y) { return this.row + (y - edge.top - this.height / 2) / this.pixels; }

  /** The cell at x, y, or null outside the matrix. */
  under(x, y) {
    const [row, col] = [Math.floor(this.rowAt(y)), Math.floor(this.colAt(x))];
    const inside = x >= edge.left && y >= edge.top && row >= 0 && row < this.layer.n && col >= 0 && col < this.layer.m;
    return inside ? { row, col } : null;
  }

  /** The visible rows and columns, [from, to) each. */
  get sight() {
    const { n, m } = this.layer;
    return {
      rows: [Math.max(0, Math.floor(this.rowAt(edge.top))), Math.min(n, Math.ceil(this.rowAt(edge.top + this.height)))],
      cols: [Math.max(0, Math.floor(this.colAt(edge.left))), Math.min(m, Math.ceil(this.colAt(edge.left + this.width)))],
    };
  }

  /** The zoom level whose cells are closest to one device pixel. */
  get level() {
    const deep = deepest(this.layer);
    return bound(Math.ceil(deep + Math.log2(this.pixels * window.devicePixelRatio) - 0.25), 0, deep);
  }

  /** Weights per side of a cell at a zoom level. */
  cells(zoom) {
    return 2 ** (deepest(this.layer) - zoom);
  }

  /** The visible tiles of a zoom level, center first. */
  tiles(zoom) {
    const span = this.cells(zoom) * side;
    const { rows, cols } = this.sight;
    const seen = [];
    for (let y = Math.floor(rows[0] / span); y * span < rows[1]; y++) {
      for (let x = Math.floor(cols[0] / span); x * span < cols[1]; x++) seen.push({ zoom, x, y });
    }
    const far = ({ x, y }) => Math.hypot((x + 0.5) * span - this.col, (y + 0.5) * span - this.row);
    return seen.sort((a, b) => far(a) - far(b));
  }
}
