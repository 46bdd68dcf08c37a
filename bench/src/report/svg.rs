//! Bar charts with the range of each value, as SVG.

use crate::{
    stats::{Summary, format_number},
    table::{Kind, Row, Table},
};
use std::fmt::Write;

/// A bar chart of one number.
pub(super) struct Chart {
    /// The number's name and unit, and whether more or less is better.
    title: &'static str,
    bars: Vec<Bar>,
}

struct Bar {
    name: String,
    kind: Kind,
    value: Summary,
}

/// The charts of `tables`: one for each number of [`CHARTS`], from the first table that has it. The best bar comes
/// first.
pub(super) fn charts(tables: &[Table]) -> Vec<Chart> {
    let chart = |(metric, title): (&str, &'static str)| {
        let bars = |table: &Table| {
            let bar = |row: &Row| {
                let name = row.setting.0.first().map(|(_, name)| name.clone())?;
                Some(Bar { name, kind: row.kind, value: *row.measured.get(metric)? })
            };
            table.rows.iter().filter_map(bar).collect::<Vec<_>>()
        };
        let mut bars = tables.iter().map(bars).find(|bars| !bars.is_empty())?;
        bars.sort_by(|a, b| a.value.median.total_cmp(&b.value.median));
        if title.contains("more is better") {
            bars.reverse();
        }
        Some(Chart { title, bars })
    };
    CHARTS.into_iter().filter_map(chart).collect()
}

/// The name of each number that has a chart, and the chart's title.
const CHARTS: [(&str, &str); 5] = [
    ("gb_per_s", "GB/s: more is better"),
    ("cpu_s_per_gib", "CPU seconds for each GiB: less is better"),
    ("small_p50_us", "4 KiB one way, microseconds, median: less is better"),
    ("p50_us", "Latency, microseconds, median: less is better"),
    ("publish_to_commit_ms", "Publish to commit, milliseconds: less is better"),
];

/// Escapes `text` for HTML and SVG, attributes included.
pub(super) fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}

/// Draws `chart`. The style sheet of the page sets its colours.
pub(super) fn draw(chart: &Chart) -> String {
    let height = TOP_MARGIN + chart.bars.len() as f64 * ROW_HEIGHT;
    let scale = Scale::of(&chart.bars);
    let title = escape(chart.title);
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-label=\"{title}\">\n\
         <text class=\"title\" x=\"0\" y=\"18\">{title}</text>\n"
    );
    for (index, bar) in chart.bars.iter().enumerate() {
        draw_bar(&mut text, bar, TOP_MARGIN + index as f64 * ROW_HEIGHT, scale);
    }
    text.push_str("</svg>\n");
    text
}

fn draw_bar(text: &mut String, bar: &Bar, top: f64, scale: Scale) {
    let Summary { median, min, max } = bar.value;
    let [value, low, high] = [median, min, max].map(|value| scale.width(value));
    let (middle, baseline) = (top + BAR_HEIGHT / 2.0, top + BAR_HEIGHT / 2.0 + 5.0);
    let (name, colour) = (escape(&bar.name), class(bar.kind));
    let (from, to) = (LEFT_MARGIN + low, LEFT_MARGIN + high);
    let label = LEFT_MARGIN + value.max(high) + 8.0;
    let _ = writeln!(
        text,
        "<text x=\"{:.1}\" y=\"{baseline:.1}\" text-anchor=\"end\">{name}</text>\
         <rect class=\"{colour}\" x=\"{LEFT_MARGIN}\" y=\"{top:.1}\" width=\"{value:.1}\" height=\"{BAR_HEIGHT}\"/>\
         <path class=\"spread\" d=\"M{from:.1} {middle:.1}H{to:.1}M{from:.1} {:.1}v8M{to:.1} {:.1}v8\"/>\
         <text x=\"{label:.1}\" y=\"{baseline:.1}\">{}</text>",
        LEFT_MARGIN - 8.0,
        middle - 4.0,
        middle - 4.0,
        format_number(median)
    );
}

/// The CSS class of a bar or row, which sets its colour.
pub(super) fn class(kind: Kind) -> &'static str {
    match kind {
        Kind::Ours => "ours",
        Kind::Encrypted => "encrypted",
        Kind::Plain => "plain",
    }
}

/// The scale of a chart, which converts values to widths.
#[derive(Debug, Clone, Copy)]
struct Scale {
    /// The value of the maximum width.
    max: f64,
}

impl Scale {
    /// The largest maximum has the full width, unless it exceeds twice the largest median: then it is truncated there,
    /// so that one outlier does not make all bars small.
    fn of(bars: &[Bar]) -> Self {
        let largest = |value: fn(&Bar) -> f64| bars.iter().map(value).fold(0.0, f64::max);
        let max = largest(|bar| bar.value.max).min(2.0 * largest(|bar| bar.value.median));
        Self { max: if max > 0.0 { max } else { 1.0 } }
    }

    fn width(self, value: f64) -> f64 {
        (value / self.max).clamp(0.0, 1.0) * (WIDTH - LEFT_MARGIN - RIGHT_MARGIN)
    }
}

// Lengths in SVG user units; the page scales the drawing to its width.
const WIDTH: f64 = 760.0;
const LEFT_MARGIN: f64 = 190.0;
const RIGHT_MARGIN: f64 = 70.0;
const TOP_MARGIN: f64 = 32.0;
const ROW_HEIGHT: f64 = 26.0;
const BAR_HEIGHT: f64 = 18.0;

#[cfg(test)]
mod tests {
    use super::*;

    fn bar(name: &str, value: f64, high: f64) -> Bar {
        let value = Summary { median: value, min: value / 2.0, max: high };
        Bar { name: name.into(), kind: Kind::Plain, value }
    }

    #[test]
    fn the_longest_bar_fills_the_width() {
        let text = draw(&Chart { title: "GB/s", bars: vec![bar("a<b>", 2.0, 2.0), bar("c", 1.0, 1.0)] });
        assert!(text.contains("a&lt;b&gt;") && !text.contains("<b>"), "{text}");
        assert!(text.contains("width=\"500.0\"") && text.contains("width=\"250.0\""), "{text}");
        assert!(text.contains("M440.0 41.0H690.0"), "the range, from half to all: {text}");
    }

    #[test]
    fn outliers_do_not_make_other_bars_small() {
        assert_eq!(Scale::of(&[bar("a", 1.0, 900.0)]).width(1.0), 250.0);
        assert_eq!(Scale::of(&[bar("a", 1.0, 900.0)]).width(900.0), 500.0);
        assert_eq!(Scale::of(&[bar("a", 0.0, 0.0)]).width(0.0), 0.0, "zeros have no width");
    }
}
