{{- define "kura-shaper.labels" -}}
app.kubernetes.io/name: kura-shaper
{{- end }}

{{- define "kura-shaper.image" -}}
{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag }}{{ end }}
{{- end }}

{{- define "kura-shaper.pools" -}}
matchExpressions:
  - key: {{ .Values.poolLabel }}
    operator: In
    values:
      {{- range .Values.pools }}
      - {{ .pool }}
      {{- end }}
{{- end }}
