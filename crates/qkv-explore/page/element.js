// Creates DOM elements: `h('button', { class: 'tab', onclick }, 'Lines')`.

/** Creates an element. Keys that start with "on" are listeners, known properties are set, all others are attributes. */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith('on')) element.addEventListener(key.slice(2), value);
    else if (key === 'class') element.className = value;
    else if (['value', 'checked', 'disabled', 'hidden', 'tabIndex', 'textContent', 'selected'].includes(key)) element[key] = value;
    else element.setAttribute(key, value === true ? '' : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** The element of index.html with this id. */
export const place = (id) => document.getElementById(id);

/** Replaces the children of an element, if it exists. */
export function fill(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** A canvas of `width` × `height` CSS pixels, sharp on any screen. Returns its context, scaled so that one unit is one CSS pixel. */
export function sized(canvas, width, height) {
  const ratio = Math.max(1, window.devicePixelRatio || 1);
  const [w, t] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w) canvas.width = w;
  if (canvas.height !== t) canvas.height = t;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext('2d');
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

/** Moves focus among `items` by arrow keys, one of them in the tab order: a roving tabindex. `across` is the number per line. */
export function rove(event, items, across = 1) {
  const now = items.indexOf(document.activeElement);
  if (now < 0) return false;
  const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: across, ArrowUp: -across, Home: -now, End: items.length - 1 - now }[event.key];
  if (step === undefined || event.shiftKey || event.altKey || event.ctrlKey || event.metaKey) return false;
  const next = items[now + step];
  event.preventDefault();
  event.stopPropagation();
  if (!next) return true;
  for (const item of items) item.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
  return true;
}
