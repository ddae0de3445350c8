// Pointer and keyboard input of a map: drag, wheel, pinch, double click, click, arrows. Reports pixels and knows
// nothing of matrices.

const still = 5; // pixels: a pointer that moves less has clicked
const second = 260; // ms within which a second click means zoom

/** Listens to a canvas. `on` has pan(x, y), zoom(factor, x, y), click(x, y), hover({ x, y } | null), enter(). Returns a function that removes the listeners. */
export function hands(canvas, on) {
  const down = new Map(); // pointers that are down: id → { x, y }
  let travelled = 0;
  let clicking = 0;
  const local = (event) => {
    const box = canvas.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  };
  const apart = (a, b) => Math.max(8, Math.hypot(a.x - b.x, a.y - b.y));

  canvas.addEventListener('pointerdown', (event) => {
    if (event.pointerType === 'mouse') event.preventDefault();
    canvas.setPointerCapture(event.pointerId);
    down.set(event.pointerId, local(event));
    if (down.size === 1) travelled = 0;
  });

  canvas.addEventListener('pointermove', (event) => {
    const here = local(event);
    const before = down.get(event.pointerId);
    if (before) {
      const [other] = [...down].filter(([id]) => id !== event.pointerId).map(([, place]) => place);
      travelled += Math.hypot(here.x - before.x, here.y - before.y);
      down.set(event.pointerId, here);
      const fingers = other ? 2 : 1;
      on.pan((before.x - here.x) / fingers, (before.y - here.y) / fingers);
      if (other) on.zoom(apart(here, other) / apart(before, other), (here.x + other.x) / 2, (here.y + other.y) / 2);
    }
    on.hover(event.pointerType === 'touch' ? null : here);
  });

  const up = (event) => {
    const last = down.size === 1;
    down.delete(event.pointerId);
    if (event.type !== 'pointerup' || travelled >= still || !last) return;
    clearTimeout(clicking);
    const { x, y } = local(event);
    clicking = setTimeout(() => on.click(x, y), second);
  };
  canvas.addEventListener('pointerup', up);
  canvas.addEventListener('pointercancel', up);
  canvas.addEventListener('pointerleave', () => on.hover(null));

  canvas.addEventListener('dblclick', (event) => {
    clearTimeout(clicking);
    const { x, y } = local(event);
    on.zoom(event.shiftKey ? 0.25 : 4, x, y);
  });

  canvas.addEventListener('wheel', (event) => {
    event.preventDefault();
    const { x, y } = local(event);
    on.zoom(2 ** (-event.deltaY * (event.deltaMode ? 16 : 1) * (event.ctrlKey ? 0.01 : 0.0025)), x, y);
    on.hover({ x, y });
  }, { passive: false });

  canvas.addEventListener('keydown', (event) => {
    if (event.shiftKey || event.ctrlKey || event.metaKey || event.altKey) return;
    const [x, y] = [0.2 * canvas.clientWidth, 0.2 * canvas.clientHeight];
    const pan = { ArrowLeft: [-x, 0], ArrowRight: [x, 0], ArrowUp: [0, -y], ArrowDown: [0, y] }[event.key];
    if (pan) on.pan(...pan);
    else if (event.key === 'Enter') on.enter();
    else return;
    event.preventDefault();
    event.stopPropagation();
  });

  return () => clearTimeout(clicking);
}
