// Small charts of the last minute. They are pictures for the eye; their label says the same in words.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 120;
const HEIGHT = 36;

// The newest figures last; null where nothing is known.
export class History {
  constructor(most) {
    this.most = most;
    this.figures = [];
  }

  push(figure) {
    this.figures.push(figure);
    if (this.figures.length > this.most) this.figures.shift();
  }
}

function part(name, className) {
  const element = document.createElementNS(SVG, name);
  element.setAttribute("class", className);
  return element;
}

function parts(svg) {
  if (!svg.firstChild) {
    const floor = part("line", "floor");
    for (const [name, value] of [["x1", 0], ["x2", WIDTH], ["y1", HEIGHT], ["y2", HEIGHT]]) {
      floor.setAttribute(name, value);
    }
    svg.append(floor, part("path", "area"), part("path", "line-path"));
  }
  return svg.children;
}

// A line with its area; a gap where a figure is not known.
export function draw(svg, history, label) {
  const [, area, line] = parts(svg);
  const most = Math.max(...history.figures.map((figure) => figure ?? 0), 1e-9);
  const step = WIDTH / (history.most - 1);
  const from = history.most - history.figures.length;
  let stroke = "";
  let fill = "";
  let begun = null;
  history.figures.forEach((figure, at) => {
    const x = ((from + at) * step).toFixed(2);
    if (figure === null) {
      if (begun !== null) fill += `L${((from + at - 1) * step).toFixed(2)} ${HEIGHT}Z`;
      begun = null;
      return;
    }
    const y = (HEIGHT - 1 - (figure / most) * (HEIGHT - 3)).toFixed(2);
    stroke += `${begun === null ? "M" : "L"}${x} ${y}`;
    fill += begun === null ? `M${x} ${HEIGHT}L${x} ${y}` : `L${x} ${y}`;
    begun = x;
  });
  if (begun !== null) fill += `L${WIDTH} ${HEIGHT}Z`;
  line.setAttribute("d", stroke);
  area.setAttribute("d", fill);
  svg.setAttribute("aria-label", label);
}

// Shares of a whole, side by side.
export function bar(svg, shares, label) {
  const whole = shares.reduce((sum, share) => sum + share, 0);
  while (svg.children.length < shares.length) {
    const rect = part("rect", `r${svg.children.length}`);
    rect.setAttribute("height", 8);
    svg.append(rect);
  }
  let x = 0;
  shares.forEach((share, at) => {
    const width = whole > 0 ? (share / whole) * WIDTH : 0;
    svg.children[at].setAttribute("x", x.toFixed(2));
    svg.children[at].setAttribute("width", width.toFixed(2));
    x += width;
  });
  svg.setAttribute("aria-label", label);
}
