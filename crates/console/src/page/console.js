// Connects the parts of the page.

import * as charts from "./charts.js";
import { onChange } from "./dialogs.js";
import * as events from "./events.js";
import { fences } from "./fences.js";
import { leases } from "./leases.js";
import { follow } from "./live.js";

const connection = document.getElementById("connection");

follow({
  state(name, text) {
    if (connection.dataset.state === name && connection.textContent === text) return;
    // The lists may have changed while the connection was lost.
    if (name === "live" && connection.dataset.state === "lost") {
      leases.resume();
      fences.resume();
    }
    connection.dataset.state = name;
    connection.textContent = text;
    document.body.classList.toggle("lost", name === "lost");
  },
  news(message) {
    if (message.hello) {
      document.getElementById("process").textContent = message.hello.process;
      charts.begin(message.hello);
    }
    charts.take(message);
    events.take(message);
    if (message.events.some((event) => events.ofLeases.has(event.kind))) leases.soon();
  },
});

function refresh() {
  leases.refresh();
  fences.refresh();
}

onChange(refresh);
refresh();
