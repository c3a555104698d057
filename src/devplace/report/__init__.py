"""What people read: tables, summaries, explanations, traces, device maps, an HTML page."""

from devplace.report.chrome_trace import chrome_trace, save_chrome_trace
from devplace.report.deviations import Deviation, Deviations, deviations
from devplace.report.device_map import (
    device_map,
    pins_of,
    read_pins,
    run_elsewhere,
    split_points,
)
from devplace.report.explain import Explanation, explain
from devplace.report.html import html_report, save_html_report
from devplace.report.measured import measured_summary, not_observed
from devplace.report.measured_memory import measured_memory_rows, measured_memory_table
from devplace.report.memory import MemoryRow, memory_rows
from devplace.report.summary import best_single, plan_summary
from devplace.report.text_tables import (
    Skipped,
    comparison_json,
    comparison_table,
    memory_json,
    memory_table,
)
from devplace.report.throughput_plan import load_rows, plan_load_lines, value_json

__all__ = [
    "Deviation",
    "Deviations",
    "Explanation",
    "MemoryRow",
    "Skipped",
    "best_single",
    "chrome_trace",
    "comparison_json",
    "comparison_table",
    "deviations",
    "device_map",
    "explain",
    "html_report",
    "load_rows",
    "measured_memory_rows",
    "measured_memory_table",
    "measured_summary",
    "memory_json",
    "memory_rows",
    "memory_table",
    "not_observed",
    "pins_of",
    "plan_load_lines",
    "plan_summary",
    "read_pins",
    "run_elsewhere",
    "save_chrome_trace",
    "save_html_report",
    "split_points",
    "value_json",
]
