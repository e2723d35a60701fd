"""What is asked of every page, as scripts that return what is wrong: contrast, and what ears and keys need."""

CONTRAST = """() => {
  const luminance = (rgb) => {
    const [r, g, b] = rgb.map((v) => { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const colour = (text) => text.match(/[\\d.]+/g).map(Number);
  const found = [];
  const walker = document.createTreeWalker(document.querySelector('main'), NodeFilter.SHOW_TEXT);
  const cells = [...document.querySelectorAll('.cells path')];
  const shades = cells.map((cell) => [cell.getAttribute('class'), getComputedStyle(cell).fill]);
  while (walker.nextNode()) {
    const node = walker.currentNode, parent = node.parentElement;
    if (!node.textContent.trim() || !parent.checkVisibility() || parent.tagName === 'title') continue;
    const style = getComputedStyle(parent);
    const svg = parent instanceof SVGElement;
    let under = null;
    if (svg && parent.closest('.written')) {
      const shade = shades.find(([name]) => name === parent.getAttribute('class'));
      under = colour(shade[1]);
    } else for (let at = parent; at && !under; at = at.parentElement) {
      const behind = colour(getComputedStyle(at).backgroundColor);
      if (behind.length < 4 || behind[3] > 0) under = behind;
    }
    const a = luminance(colour(svg ? style.fill : style.color).slice(0, 3));
    const b = luminance((under || [255, 255, 255]).slice(0, 3));
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const where = `${parent.tagName}.${parent.getAttribute('class')} ${node.textContent.trim().slice(0, 30)}`;
    if (ratio < 4.5) found.push(`${ratio.toFixed(2)} ${where}`);
  }
  return found;
}"""

ACCESS = """() => {
  const wrong = [];
  const say = (what, node) => wrong.push(`${what}: ${node.outerHTML.slice(0, 90)}`);
  const all = (selector) => [...document.querySelectorAll(selector)];
  const check = (what, selector, bad) => all(selector).filter(bad).forEach((node) => say(what, node));
  const labelled = (node) => node.getAttribute('aria-label');
  const named = (node) => labelled(node) || node.textContent.trim()
    || [...(node.labels || [])].map((label) => label.textContent).join('').trim();
  const ids = all('[id]').map((node) => node.id);
  check('no name', '[role=img], [role=region]', (node) => !labelled(node));
  check('no name', 'input, button, summary, a, th', (node) => !named(node));
  check('neither picture nor decoration', 'main svg', (svg) => !svg.closest('[role=img], [aria-hidden]'));
  check('a head of nothing', 'thead th:not([scope])', () => true);
  check('no legend', 'fieldset', (set) => !set.querySelector('legend'));
  check('jumps the queue', '[tabindex]', (node) => node.tabIndex > 0);
  check('one inside the other', 'a a, a button, button button, button a', () => true);
  check('an id twice', '[id]', (node) => ids.indexOf(node.id) !== ids.lastIndexOf(node.id));
  check('leads nowhere', 'a[href^="#"]', (a) => !document.getElementById(decodeURIComponent(a.hash.slice(1))));
  const levels = all('h1, h2, h3').map((node) => Number(node.tagName[1]));
  if (levels[0] !== 1 || levels.filter((level) => level === 1).length !== 1) wrong.push('not one h1 at the top');
  if (!document.title || document.documentElement.lang !== 'en') wrong.push('no title or no language');
  if (all('main').length !== 1) wrong.push('not one main');
  return wrong;
}"""
