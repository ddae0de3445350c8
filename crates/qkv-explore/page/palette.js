// Color maps. A palette is a list of control points in OKLCH (lightness, chroma, hue), interpolated in OKLab. Lightness
// is monotonic, so that order survives color blindness and grayscale print. In the light theme 0 is nearly white and 1
// is dark; in the dark theme it is the other way round.

const points = {
  sea: {
    light: [[0.985, 0.004, 120], [0.915, 0.062, 150], [0.78, 0.1, 182], [0.6, 0.108, 225], [0.42, 0.125, 268], [0.26, 0.1, 288]],
    dark: [[0.235, 0.012, 275], [0.36, 0.095, 278], [0.5, 0.12, 250], [0.66, 0.115, 205], [0.81, 0.125, 155], [0.95, 0.11, 108]],
  },
  ember: {
    light: [[0.985, 0.004, 90], [0.92, 0.07, 88], [0.8, 0.13, 66], [0.62, 0.17, 40], [0.43, 0.14, 22], [0.25, 0.07, 5]],
    dark: [[0.235, 0.012, 20], [0.36, 0.09, 10], [0.5, 0.16, 25], [0.66, 0.17, 45], [0.82, 0.14, 75], [0.96, 0.07, 100]],
  },
  grey: {
    light: [[0.985, 0, 0], [0.2, 0, 0]],
    dark: [[0.235, 0, 0], [0.97, 0, 0]],
  },
};

/** Palette names, the default first. */
export const names = Object.keys(points);

const gamma = (x) => Math.round(255 * Math.min(1, Math.max(0, x <= 0.0031308 ? 12.92 * x : 1.055 * x ** (1 / 2.4) - 0.055)));

function rgb([l, a, b]) {
  const [x, y, z] = [l + 0.3963377774 * a + 0.2158037573 * b, l - 0.1055613458 * a - 0.0638541728 * b, l - 0.0894841775 * a - 1.291485548 * b].map((v) => v ** 3);
  return [4.0767416621 * x - 3.3077115913 * y + 0.2309699292 * z, -1.2684380046 * x + 2.6097574011 * y - 0.3413193965 * z,
    -0.0041960863 * x - 0.7034186147 * y + 1.707614701 * z].map(gamma);
}

const lab = ([l, c, hue]) => [l, c * Math.cos((hue * Math.PI) / 180), c * Math.sin((hue * Math.PI) / 180)];

/** A palette as a function from 0…1 to [red, green, blue] in 0…255. Unknown names give the default. */
export function palette(name, theme) {
  const stops = (points[name] ?? points.sea)[theme].map(lab);
  return (t) => {
    const at = Math.min(1, Math.max(0, t)) * (stops.length - 1);
    const i = Math.min(stops.length - 2, Math.floor(at));
    return rgb(stops[i].map((v, part) => v + (stops[i + 1][part] - v) * (at - i)));
  };
}

export const css = ([red, green, blue]) => `rgb(${red} ${green} ${blue})`;
