"""The script of the report page: the table of tests with its filters, and the details of a test.

The table is plain HTML, because names of tests are long: a cell must wrap them.
"""

from __future__ import annotations

SCRIPT = r"""
const accel = {tests: null, details: [], chosen: -1};
(async () => {
const find = (id) => document.getElementById(id)
const MOST = 1000  // Rows that are shown. A row of 5,000 takes 0.1 ms to lay out.
const body = document.querySelector("#tests tbody")
const heads = Array.from(document.querySelectorAll("#tests th"))
let order = []

accel.bars = () => window.Bokeh?.documents[0]?.get_model_by_name("bars")

accel.choose = (n) => {
  if (n === accel.chosen) return
  const before = accel.chosen
  accel.chosen = n
  mark()
  find("details").hidden = n < 0
  const bars = accel.bars()
  if (bars) bars.selected.indices = Array.from(bars.data.n.keys()).filter((bar) => bars.data.n[bar] === n)
  if (n < 0) return body.querySelector(`tr[data-n="${before}"] button`)?.focus({preventScroll: true})
  find("text").innerHTML = accel.details[n]  // Escaped by Python.
  find("details").scrollTop = 0
  find("close").focus({preventScroll: true})
}

function mark() {
  for (const row of body.rows) row.classList.toggle("chosen", Number(row.dataset.n) === accel.chosen)
}

function row(n) {
  const made = document.createElement("tr")
  made.dataset.n = n
  for (const head of heads) {
    const key = head.firstElementChild.dataset.key
    const value = accel.tests[key][n]
    const cell = made.insertCell()
    cell.className = head.className
    if (key === "verdict") cell.style.color = `var(--${value})`
    const part = key === "test" ? cell.appendChild(document.createElement("button")) : cell
    part.textContent = typeof value === "number" ? value.toFixed(2) : value ?? ""
  }
  return made
}

function show() {
  const {test, verdict} = accel.tests
  const part = find("part").value.toLowerCase()
  const wanted = find("verdict").value
  const found = order.filter((n) => (
    test[n].toLowerCase().includes(part) && (wanted === "all" || wanted === verdict[n])
  ))
  body.replaceChildren(...found.slice(0, MOST).map(row))
  mark()
  find("count").textContent = `${found.length} of ${test.length} tests`
    + (found.length > MOST ? `, the first ${MOST} are shown` : "")
}

function sort(head) {
  const down = head.ariaSort === "ascending"
  for (const other of heads) other.removeAttribute("aria-sort")
  head.ariaSort = down ? "descending" : "ascending"
  const values = accel.tests[head.firstElementChild.dataset.key]
  order.sort((a, b) => {
    const [x, y] = [values[a] ?? -1, values[b] ?? -1]
    return (x < y ? -1 : x > y ? 1 : 0) * (down ? -1 : 1)
  })
  show()
}

if (body === null) return
const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0))
const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
[accel.tests, accel.details] = await new Response(stream).json()
order = accel.tests.test.map((_, n) => n)
find("part").addEventListener("input", show)
find("verdict").addEventListener("change", show)
document.querySelector(".filters").addEventListener("submit", (event) => event.preventDefault())
for (const head of heads) head.firstElementChild.addEventListener("click", () => sort(head))
body.addEventListener("click", (event) => {
  const row = event.target.closest("tr")
  if (row && getSelection().isCollapsed) accel.choose(Number(row.dataset.n))
})
find("close").addEventListener("click", () => accel.choose(-1))
document.addEventListener("keydown", (event) => { if (event.key === "Escape") accel.choose(-1) })
show()
})()
"""
