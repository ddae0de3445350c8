// Number formatting. A weight has six decimals, or an exponent if that would show only zeros.

/** A weight: `0.512346`, `3.21e-7`, `0`. */
export function weight(value) {
  if (Number.isNaN(value)) return '–';
  if (value === 0) return '0';
  return Math.abs(value) < 1e-4 ? value.toExponential(2) : value.toFixed(6);
}

/** Any other number, four significant digits. */
export function plain(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return '–';
  if (value === 0) return '0';
  const size = Math.abs(value);
  if (!Number.isFinite(value)) return value > 0 ? '∞' : '−∞';
  if (size < 1e-4 || size >= 1e6) return value.toExponential(2).replace('-', '−');
  return value.toFixed(size >= 100 ? 1 : size >= 10 ? 2 : size >= 1 ? 3 : size >= 0.01 ? 4 : 5).replace('-', '−');
}

/** A probability in percent. */
export const percent = (value) => `${(100 * value).toFixed(value < 0.0995 ? 1 : 0)} %`;

/** An integer with thousands separators: `100,000`. */
export const count = (value) => value.toLocaleString('en');
