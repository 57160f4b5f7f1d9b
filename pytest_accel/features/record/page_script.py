"""The script of the report page: the table of tests with its filters, the details of a test, and the legend.

The table is plain HTML, because names of tests are long: a cell must wrap them.
"""

from __future__ import annotations

SCRIPT = r"""
const accel = {tests: null, details: [], chosen: -1};
(() => {
const find = (id) => document.getElementById(id)
const STEP = 100  // Rows that are shown at first, and that "Show more" adds. A row of 5,000 takes 0.1 ms to lay out.
const body = document.querySelector("#tests tbody")
const heads = Array.from(document.querySelectorAll("#tests th"))
let shown = STEP
let order = []

accel.bars = () => window.Bokeh?.documents[0]?.get_model_by_name("bars")

accel.choose = (n) => {
  if (n === accel.chosen) return
  const before = accel.chosen
  accel.chosen = n
  mark()
  find("details").hidden = n < 0
  const bars = accel.bars()
  if (bars) {
    const chosen = []
    bars.data.n.forEach((test, bar) => { if (test === n) chosen.push(bar) })
    bars.selected.indices = chosen
  }
  if (n < 0) {
    body?.querySelector(`tr[data-n="${before}"] button`)?.focus({preventScroll: true})
    return
  }
  find("text").innerHTML = accel.details[n]  // Escaped by Python.
  find("details").scrollTop = 0
  find("close").focus({preventScroll: true})
}

function mark() {
  for (const row of body?.rows ?? []) row.classList.toggle("chosen", Number(row.dataset.n) === accel.chosen)
}

function row(n) {
  const made = document.createElement("tr")
  made.dataset.n = n
  for (const head of heads) {
    const key = head.firstElementChild.dataset.key
    const value = accel.tests[key][n]
    const cell = made.insertCell()
    cell.className = head.className
    if (key === "test") {
      const button = cell.appendChild(document.createElement("button"))
      button.type = "button"
      button.textContent = value
      continue
    }
    if (key === "devices") {
      for (const part of value.split(" ")) {
        cell.appendChild(document.createElement("span")).textContent = part
        cell.append(" ")
      }
      continue
    }
    if (key === "verdict") cell.classList.add(value)
    cell.textContent = typeof value === "number" && key !== "ranks" ? value.toFixed(2) : value ?? ""
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
  body.replaceChildren(...found.slice(0, shown).map(row))
  mark()
  find("count").textContent = `${found.length} of ${test.length} tests`
    + (found.length > shown ? `, the first ${shown} are shown` : "")
  find("more").hidden = found.length <= shown
}

function sort(head) {
  const down = head.ariaSort === "ascending"
  for (const other of heads) other.removeAttribute("aria-sort")
  head.ariaSort = down ? "descending" : "ascending"
  const values = accel.tests[head.firstElementChild.dataset.key]
  const least = typeof values.find((value) => value !== null) === "number" ? -Infinity : ""
  order.sort((a, b) => {
    const [x, y] = [values[a] ?? least, values[b] ?? least]
    return (x < y ? -1 : x > y ? 1 : 0) * (down ? -1 : 1)
  })
  show()
}

function legend() {
  document.querySelectorAll(".legend button").forEach((button, kind) => button.addEventListener("click", () => {
    const visible = button.ariaPressed !== "true"
    button.ariaPressed = String(visible)
    Bokeh.documents[0].get_model_by_name("timeline").renderers[kind].visible = visible
  }))
}

async function start() {
  legend()
  const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0))
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))
  const [tests, details] = await new Response(stream).json()
  if (body === null) return
  accel.details = details
  accel.tests = tests
  order = tests.test.map((_, n) => n)
  const again = () => { shown = STEP; show() }
  find("part").addEventListener("input", again)
  find("verdict").addEventListener("change", again)
  document.querySelector(".filters").addEventListener("submit", (event) => event.preventDefault())
  find("more").addEventListener("click", () => { shown *= 10; show() })
  for (const head of heads) head.firstElementChild.addEventListener("click", () => sort(head))
  body.addEventListener("click", (event) => {
    const row = event.target.closest("tr")
    if (row && getSelection().isCollapsed) accel.choose(Number(row.dataset.n))
  })
  find("close").addEventListener("click", () => accel.choose(-1))
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") accel.choose(-1) })
  show()
}
start()
})()
"""
