//! Bars with their spread, as SVG.

use crate::{
    stats::{Summary, number},
    table::{Kind, Row, Table},
};
use std::fmt::Write;

/// One measure of several, side by side.
pub(super) struct Chart {
    /// The title, the unit, and whether more is better.
    title: &'static str,
    bars: Vec<Bar>,
}

struct Bar {
    name: String,
    kind: Kind,
    value: Summary,
}

/// The bars drawn from `tables`: each number from the first table that has it, the best first.
pub(super) fn charts(tables: &[Table]) -> Vec<Chart> {
    let chart = |(number, title): (&str, &'static str)| {
        let bars = |table: &Table| {
            let bar = |row: &Row| {
                let name = row.setting.0.first().map(|(_, name)| name.clone())?;
                Some(Bar { name, kind: row.kind, value: *row.measured.get(number)? })
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

const CHARTS: [(&str, &str); 5] = [
    ("gb_per_s", "GB/s: more is better"),
    ("cpu_s_per_gib", "CPU seconds for each GiB: less is better"),
    ("small_p50_us", "4 KiB one way, microseconds, median: less is better"),
    ("p50_us", "Latency, microseconds, median: less is better"),
    ("publish_to_commit_ms", "Publish to commit, milliseconds: less is better"),
];

/// `text` as it is written inside of HTML and SVG, also in attributes.
pub(super) fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}

/// Draws `chart`. Its colours are those of the page that it stands in.
pub(super) fn draw(chart: &Chart) -> String {
    let height = TOP + chart.bars.len() as f64 * STEP;
    let scale = Scale::of(&chart.bars);
    let title = escape(chart.title);
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-label=\"{title}\">\n\
         <text class=\"title\" x=\"0\" y=\"18\">{title}</text>\n"
    );
    for (index, bar) in chart.bars.iter().enumerate() {
        draw_bar(&mut text, bar, TOP + index as f64 * STEP, scale);
    }
    text.push_str("</svg>\n");
    text
}

fn draw_bar(text: &mut String, bar: &Bar, top: f64, scale: Scale) {
    let Summary { median, min, max } = bar.value;
    let [value, low, high] = [median, min, max].map(|value| scale.width(value));
    let (middle, baseline) = (top + THICK / 2.0, top + THICK / 2.0 + 5.0);
    let (name, colour) = (escape(&bar.name), class(bar.kind));
    let (from, to) = (LEFT + low, LEFT + high);
    let label = LEFT + value.max(high) + 8.0;
    let _ = writeln!(
        text,
        "<text x=\"{:.1}\" y=\"{baseline:.1}\" text-anchor=\"end\">{name}</text>\
         <rect class=\"{colour}\" x=\"{LEFT}\" y=\"{top:.1}\" width=\"{value:.1}\" height=\"{THICK}\"/>\
         <path class=\"spread\" d=\"M{from:.1} {middle:.1}H{to:.1}M{from:.1} {:.1}v8M{to:.1} {:.1}v8\"/>\
         <text x=\"{label:.1}\" y=\"{baseline:.1}\">{}</text>",
        LEFT - 8.0,
        middle - 4.0,
        middle - 4.0,
        number(median)
    );
}

/// The class of a bar, which the page gives a colour.
pub(super) fn class(kind: Kind) -> &'static str {
    match kind {
        Kind::Ours => "ours",
        Kind::Encrypted => "encrypted",
        Kind::Plain => "plain",
    }
}

/// The width of a value.
#[derive(Debug, Clone, Copy)]
struct Scale {
    most: f64,
}

impl Scale {
    /// The largest value gets the whole width. A spread that goes far beyond all values is cut at their double, so that
    /// one outlier does not make all others small.
    fn of(bars: &[Bar]) -> Self {
        let most_of = |value: fn(&Bar) -> f64| bars.iter().map(value).fold(0.0, f64::max);
        let most = most_of(|bar| bar.value.max).min(2.0 * most_of(|bar| bar.value.median));
        Self { most: if most > 0.0 { most } else { 1.0 } }
    }

    fn width(self, value: f64) -> f64 {
        (value / self.most).clamp(0.0, 1.0) * (WIDTH - LEFT - RIGHT)
    }
}

// In the units of the drawing, which the page scales to its width.
const WIDTH: f64 = 760.0;
const LEFT: f64 = 190.0;
const RIGHT: f64 = 70.0;
const TOP: f64 = 32.0;
const STEP: f64 = 26.0;
const THICK: f64 = 18.0;

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
        assert!(text.contains("M440.0 41.0H690.0"), "the spread, from half to all: {text}");
    }

    #[test]
    fn outliers_do_not_make_the_rest_small() {
        assert_eq!(Scale::of(&[bar("a", 1.0, 900.0)]).width(1.0), 250.0);
        assert_eq!(Scale::of(&[bar("a", 1.0, 900.0)]).width(900.0), 500.0);
        assert_eq!(Scale::of(&[bar("a", 0.0, 0.0)]).width(0.0), 0.0, "zeros are no bars");
    }
}
