//! Durations on the command line.

use std::time::Duration;

/// The maximum duration: 100 years. `Instant + Duration` panics if the sum overflows.
const LONGEST: Duration = Duration::from_secs(100 * 31_557_600);

/// Parses a duration: `500ms`, `30s`, `5m`, `1h 30m`.
pub fn duration(text: &str) -> Result<Duration, String> {
    match humantime::parse_duration(text) {
        Ok(duration) if duration <= LONGEST => Ok(duration),
        Ok(_) => Err("a duration must be at most 100 years".into()),
        Err(_) => Err("a duration must be a number with a unit: 500ms, 30s, 5m, 2h".into()),
    }
}

/// Parses a duration that must not be 0.
pub fn positive(text: &str) -> Result<Duration, String> {
    let duration = duration(text)?;
    if duration.is_zero() {
        return Err("this duration must be above 0".into());
    }
    Ok(duration)
}

/// Parses the TTL of a lease, which is at least 100 ms, as for the leases of a server.
pub fn ttl(text: &str) -> Result<Duration, String> {
    let duration = duration(text)?;
    if duration < Duration::from_millis(100) {
        return Err("a TTL must be at least 100ms".into());
    }
    Ok(duration)
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

    #[test]
    fn durations_that_would_overflow_a_deadline_are_refused() {
        assert_eq!(duration("100years"), Ok(LONGEST));
        for text in ["101years", "400000000000years", "99999999999999999999years"] {
            assert!(duration(text).is_err(), "{text}");
        }
        assert!(positive("0s").is_err() && positive("1ms").is_ok());
    }
}
