"""Tables, figures and pages, whatever they show."""
