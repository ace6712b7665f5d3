//! Durations on the command line.

use std::time::Duration;

/// Parses a duration: `500ms`, `30s`, `5m`, `1h 30m`.
pub fn duration(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text)
        .map_err(|_| "a duration is a number with a unit: 500ms, 30s, 5m, 2h".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_length_of_time_has_a_unit() {
        assert_eq!(duration("90s"), Ok(Duration::from_secs(90)));
        assert_eq!(duration("1h 30m"), Ok(Duration::from_secs(5_400)));
        assert!(duration("90").is_err() && duration("-1s").is_err());
    }
}
